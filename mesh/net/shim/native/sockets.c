/* Where sockets go and what they are called. */
#include "shim.h"

#include <netinet/tcp.h>
#include <time.h>

#define NOBODYS_PORT 1

/* An IPv6 socket speaks to loopback by mapped addresses, which it must be allowed to before it is bound. */
static void allow_mapped(int fd, sa_family_t family) {
  static const int no = 0;
  if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
}

/* This machine's own address: nobody else's business. The other end sees an own address, too. */
static int connect_self(int fd, sa_family_t family, const struct address *address, uint16_t port) {
  union name name;
  uint32_t ip;
  static const int yes = 1;
  if (!to_loopback(address, &ip)) return refuse(EADDRNOTAVAIL);
  allow_mapped(fd, family);
  setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &yes, sizeof yes);
  socklen_t length = make_name(&name, family, ip, 0);
  real.bind(fd, &name.any, length); /* fails when the program has bound it: then it stays what it is */
  length = make_name(&name, family, ip, port);
  return real.connect(fd, &name.any, length);
}

/* No datagram leaves the machine. Who connects only to see its own address, as many do, sees the overlay's; what is
 * sent is refused, by a port that nobody has. */
static int connect_nowhere(int fd, sa_family_t family) {
  union name name;
  uint32_t ip;
  int type = 0;
  socklen_t length = sizeof type;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0) return -1;
  if (type != SOCK_DGRAM || !to_loopback(&shim.self[0], &ip)) return refuse(EHOSTUNREACH);
  allow_mapped(fd, family);
  length = make_name(&name, family, ip, 0);
  real.bind(fd, &name.any, length); /* fails when the program has bound it */
  length = make_name(&name, family, GATEWAY_IP, htons(NOBODYS_PORT));
  return real.connect(fd, &name.any, length);
}

static struct slot *slot_of(uint32_t source, uint16_t port) {
  return &shim.slots[(source == SOURCE_IP ? 0 : BANK_SLOTS) + ntohs(port)];
}

/* Binds the socket if the program has not, and tells where it is. */
static int know_source(int fd, sa_family_t family, uint32_t *source, uint16_t *port) {
  union name name;
  socklen_t length = make_name(&name, family, SOURCE_IP, 0);
  allow_mapped(fd, family);
  if (real.bind(fd, &name.any, length) != 0 && errno != EINVAL)
    return refuse(errno == EADDRINUSE ? EADDRNOTAVAIL : errno);
  length = sizeof name;
  if (real.getsockname(fd, &name.any, &length) != 0) return -1;
  *source = ip_of(&name.any, length);
  *port = port_of(&name.any);
  if (*source == 0) *source = LOOPBACK_IP; /* any address: what the kernel takes towards loopback */
  return 0;
}

static int connect_asked(int fd, sa_family_t family, const struct address *address, uint16_t port) {
  union name gateway;
  socklen_t length = make_name(&gateway, family, GATEWAY_IP, shim.header->port);
  uint32_t source;
  uint16_t source_port;
  struct timespec now;
  if (know_source(fd, family, &source, &source_port) != 0) return -1;
  struct slot *slot = slot_of(source, source_port);
  clock_gettime(CLOCK_MONOTONIC, &now);
  __atomic_store_n(&slot->state, EMPTY, __ATOMIC_RELEASE);
  slot->when_s = (uint32_t)now.tv_sec;
  slot->source = htonl(source);
  slot->port = port;
  slot->family = address->family;
  memcpy(slot->target, address->bytes, sizeof slot->target);
  __atomic_store_n(&slot->state, ASKED, __ATOMIC_RELEASE);
  int done = real.connect(fd, &gateway.any, length);
  if (done != 0 && errno != EINPROGRESS && errno != EINTR) {
    uint32_t asked = ASKED;
    __atomic_compare_exchange_n(&slot->state, &asked, EMPTY, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }
  return done;
}

static int connect_overlay(int fd, sa_family_t family, const struct address *address, uint16_t port) {
  uint8_t state = 0;
  socklen_t length = sizeof state;
  bool is_tcp = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &state, &length) == 0;
  if (!is_tcp && (errno == EBADF || errno == ENOTSOCK)) return -1;
  if (is_self(address)) return connect_self(fd, family, address, port);
  if (!is_tcp) return connect_nowhere(fd, family);
  if (state != TCP_CLOSE) { /* asked already: the kernel knows whether it is there */
    union name gateway;
    length = make_name(&gateway, family, GATEWAY_IP, shim.header->port);
    return real.connect(fd, &gateway.any, length);
  }
  /* Nobody else may bind the same port until the gateway has the connection: it is the key of the slot. */
  int reuse = 0, no = 0;
  length = sizeof reuse;
  getsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, &length);
  if (reuse != 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &no, sizeof no);
  int done = connect_asked(fd, family, address, port);
  if (reuse != 0) {
    int error = errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
    errno = error;
  }
  return done;
}

EXPORT int connect(int fd, __CONST_SOCKADDR_ARG to, socklen_t length) {
  ensure();
  struct address address = {0};
  if (shim.mode == OFF || !overlay_of(to.__sockaddr__, length, &address))
    return real.connect(fd, to.__sockaddr__, length);
  if (shim.mode == BROKEN) return refuse(EHOSTUNREACH);
  return connect_overlay(fd, to.__sockaddr__->sa_family, &address, port_of(to.__sockaddr__));
}

EXPORT int bind(int fd, __CONST_SOCKADDR_ARG to, socklen_t length) {
  ensure();
  struct address address = {0};
  uint32_t ip;
  if (shim.mode != ON || !overlay_of(to.__sockaddr__, length, &address) || !is_self(&address) ||
      !to_loopback(&address, &ip))
    return real.bind(fd, to.__sockaddr__, length);
  union name name;
  allow_mapped(fd, to.__sockaddr__->sa_family);
  length = make_name(&name, to.__sockaddr__->sa_family, ip, port_of(to.__sockaddr__));
  return real.bind(fd, &name.any, length);
}

/* ---- names of sockets --------------------------------------------------------------------------------------------- */

/* The slot of a connection that went to the gateway, by the socket's own name; NULL when it is none. */
static struct slot *slot_by_name(const struct sockaddr *own, socklen_t length) {
  uint32_t source = ip_of(own, length);
  if (source == 0) return NULL;
  struct slot *slot = slot_of(source, port_of(own));
  return slot->state != EMPTY && slot->source == htonl(source) ? slot : NULL;
}

static void tell_peer(int fd, struct sockaddr *name, socklen_t length) {
  uint32_t ip = ip_of(name, length);
  struct address address;
  if (ip >> 24 != 127) return;
  if (ip == GATEWAY_IP) {
    union name own;
    socklen_t own_length = sizeof own;
    if (real.getsockname(fd, &own.any, &own_length) != 0) return;
    const struct slot *slot = slot_by_name(&own.any, own_length);
    if (slot == NULL) return;
    address.family = slot->family;
    memcpy(address.bytes, slot->target, sizeof address.bytes);
    put_address(name, &address);
    put_port(name, slot->port);
  } else if (from_loopback(ip, &address)) {
    put_address(name, &address);
  }
}

static bool goes_to_the_gateway(int fd) {
  union name peer;
  socklen_t length = sizeof peer;
  return real.getpeername(fd, &peer.any, &length) == 0 && ip_of(&peer.any, length) == GATEWAY_IP;
}

static void tell_own(int fd, struct sockaddr *name, socklen_t length) {
  uint32_t ip = ip_of(name, length);
  struct address address;
  if (ip >> 24 != 127) return;
  if (from_loopback(ip, &address)) {
    put_address(name, &address);
    return;
  }
  if (ip != SOURCE_IP && ip != LOOPBACK_IP) return;
  const struct slot *slot = slot_by_name(name, length);
  if (slot == NULL || (ip == LOOPBACK_IP && !goes_to_the_gateway(fd))) return;
  for (int i = 0; i < SELF_MAX && shim.self[i].family != 0; i++) {
    if (shim.self[i].family == slot->family) {
      put_address(name, &shim.self[i]);
      return;
    }
  }
}

EXPORT int getpeername(int fd, __SOCKADDR_ARG name, socklen_t *restrict length) {
  ensure();
  socklen_t room = length != NULL ? *length : 0;
  int done = real.getpeername(fd, name.__sockaddr__, length);
  if (done == 0 && shim.mode == ON && *length <= room) tell_peer(fd, name.__sockaddr__, *length);
  return done;
}

EXPORT int getsockname(int fd, __SOCKADDR_ARG name, socklen_t *restrict length) {
  ensure();
  socklen_t room = length != NULL ? *length : 0;
  int done = real.getsockname(fd, name.__sockaddr__, length);
  if (done == 0 && shim.mode == ON && *length <= room) tell_own(fd, name.__sockaddr__, *length);
  return done;
}

EXPORT int accept(int fd, __SOCKADDR_ARG name, socklen_t *restrict length) {
  ensure();
  socklen_t room = name.__sockaddr__ != NULL && length != NULL ? *length : 0;
  int done = real.accept(fd, name.__sockaddr__, length);
  if (done >= 0 && shim.mode == ON && room != 0 && *length <= room) tell_peer(done, name.__sockaddr__, *length);
  return done;
}

EXPORT int accept4(int fd, __SOCKADDR_ARG name, socklen_t *restrict length, int flags) {
  ensure();
  socklen_t room = name.__sockaddr__ != NULL && length != NULL ? *length : 0;
  int done = real.accept4(fd, name.__sockaddr__, length, flags);
  if (done >= 0 && shim.mode == ON && room != 0 && *length <= room) tell_peer(done, name.__sockaddr__, *length);
  return done;
}

/* ---- datagrams: to oneself, and to nobody else --------------------------------------------------------------------- */

/* 0: no overlay address, or none of a peer; `name` is where it goes instead when `*length` is not 0. */
static int redirect_datagram(const void *to, socklen_t to_length, union name *name, socklen_t *length) {
  struct address address = {0};
  uint32_t ip;
  *length = 0;
  if (shim.mode == OFF || !overlay_of(to, to_length, &address)) return 0;
  if (shim.mode == BROKEN || !is_self(&address) || !to_loopback(&address, &ip)) return refuse(EHOSTUNREACH);
  *length = make_name(name, ((const struct sockaddr *)to)->sa_family, ip, port_of(to));
  return 0;
}

EXPORT ssize_t sendto(int fd, const void *data, size_t size, int flags, __CONST_SOCKADDR_ARG to, socklen_t length) {
  ensure();
  union name name;
  socklen_t other = 0;
  if (to.__sockaddr__ != NULL && redirect_datagram(to.__sockaddr__, length, &name, &other) != 0) return -1;
  return real.sendto(fd, data, size, flags, other != 0 ? &name.any : to.__sockaddr__, other != 0 ? other : length);
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  ensure();
  if (message == NULL || message->msg_name == NULL) return real.sendmsg(fd, message, flags);
  union name name;
  socklen_t other;
  if (redirect_datagram(message->msg_name, message->msg_namelen, &name, &other) != 0) return -1;
  if (other == 0) return real.sendmsg(fd, message, flags);
  struct msghdr changed = *message;
  changed.msg_name = &name;
  changed.msg_namelen = other;
  return real.sendmsg(fd, &changed, flags);
}

EXPORT int sendmmsg(int fd, struct mmsghdr *messages, unsigned count, int flags) {
  ensure();
  bool is_plain = true;
  struct address address;
  for (unsigned i = 0; i < count && is_plain; i++)
    is_plain = !overlay_of(messages[i].msg_hdr.msg_name, messages[i].msg_hdr.msg_namelen, &address);
  if (is_plain) return real.sendmmsg(fd, messages, count, flags);
  for (unsigned i = 0; i < count; i++) {
    ssize_t sent = sendmsg(fd, &messages[i].msg_hdr, flags);
    if (sent < 0) return i > 0 ? (int)i : -1;
    messages[i].msg_len = (unsigned)sent;
  }
  return (int)count;
}
