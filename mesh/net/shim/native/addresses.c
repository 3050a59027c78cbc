/* Overlay addresses, loopback addresses, and names of sockets. Pure, but for what is this machine's own. */
#include "shim.h"

#include <arpa/inet.h>

static const uint8_t MAPPED[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

static bool is_mapped(const struct in6_addr *ip) { return memcmp(ip, MAPPED, sizeof MAPPED) == 0; }

static uint32_t number(const uint8_t *bytes) {
  uint32_t value;
  memcpy(&value, bytes, sizeof value);
  return ntohl(value);
}

static void write_number(uint8_t *bytes, uint32_t value) {
  value = htonl(value);
  memcpy(bytes, &value, sizeof value);
}

bool overlay_of(const struct sockaddr *name, socklen_t length, struct address *found) {
  if (name == NULL || length < sizeof(sa_family_t)) return false;
  if (name->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
    uint32_t ip = ntohl(((const struct sockaddr_in *)name)->sin_addr.s_addr);
    if ((ip & 0xfffe0000u) != 0xc6120000u) return false;
    *found = (struct address){.family = 4};
    write_number(found->bytes, ip);
    return true;
  }
  if (name->sa_family != AF_INET6 || length < offsetof(struct sockaddr_in6, sin6_scope_id)) return false;
  const struct in6_addr *ip = &((const struct sockaddr_in6 *)name)->sin6_addr;
  *found = (struct address){.family = is_mapped(ip) ? 4 : 6};
  if (found->family == 6)
    memcpy(found->bytes, ip, 16);
  else
    memcpy(found->bytes, ip->s6_addr + 12, 4);
  return found->family == 6 ? number(found->bytes) == 0xfd676d00u
                            : (number(found->bytes) & 0xfffe0000u) == 0xc6120000u;
}

bool is_self(const struct address *address) {
  for (int i = 0; i < SELF_MAX && shim.self[i].family != 0; i++)
    if (shim.self[i].family == address->family && memcmp(shim.self[i].bytes, address->bytes, 16) == 0) return true;
  return false;
}

/* 198.18.x.y and 198.19.x.y are 127.18.x.y and 127.19.x.y; fd67:6d00:G::n (G is 0 or 1) is 127.(82 + G).(n as two
 * bytes). */
bool to_loopback(const struct address *address, uint32_t *ip) {
  if (address->family == 4) {
    *ip = 0x7f000000u | (number(address->bytes) & 0xffffffu);
    return true;
  }
  static const uint8_t zeros[8];
  uint32_t group = number(address->bytes + 4) >> 16;
  if (group > 1 || memcmp(address->bytes + 6, zeros, sizeof zeros) != 0) return false;
  *ip = 0x7f000000u | ((82 + group) << 16) | (number(address->bytes + 12) & 0xffffu);
  return true;
}

bool from_loopback(uint32_t ip, struct address *found) {
  uint32_t first = ip >> 24, second = ip >> 16 & 0xff;
  *found = (struct address){0};
  if (first != 127) return false;
  if (second == 18 || second == 19) {
    found->family = 4;
    write_number(found->bytes, 0xc6000000u | (ip & 0xffffffu));
    return true;
  }
  if (second != 82 && second != 83) return false;
  found->family = 6;
  write_number(found->bytes, 0xfd676d00u);
  found->bytes[5] = (uint8_t)(second - 82);
  write_number(found->bytes + 12, ip & 0xffffu);
  return true;
}

uint32_t ip_of(const struct sockaddr *name, socklen_t length) {
  if (length >= sizeof(struct sockaddr_in) && name->sa_family == AF_INET)
    return ntohl(((const struct sockaddr_in *)name)->sin_addr.s_addr);
  if (length >= sizeof(struct sockaddr_in6) && name->sa_family == AF_INET6) {
    const struct in6_addr *ip = &((const struct sockaddr_in6 *)name)->sin6_addr;
    return is_mapped(ip) ? number(ip->s6_addr + 12) : 0;
  }
  return 0;
}

uint16_t port_of(const struct sockaddr *name) {
  return name->sa_family == AF_INET6 ? ((const struct sockaddr_in6 *)name)->sin6_port
                                     : ((const struct sockaddr_in *)name)->sin_port;
}

void put_port(struct sockaddr *name, uint16_t port) {
  if (name->sa_family == AF_INET6)
    ((struct sockaddr_in6 *)name)->sin6_port = port;
  else
    ((struct sockaddr_in *)name)->sin_port = port;
}

void put_address(struct sockaddr *name, const struct address *address) {
  if (name->sa_family != AF_INET6) {
    uint32_t beside = 0xc6120000u + ((uint32_t)address->bytes[5] << 16) + (number(address->bytes + 12) & 0xffffu);
    uint32_t ip = address->family == 4 ? number(address->bytes) : beside;
    ((struct sockaddr_in *)name)->sin_addr.s_addr = htonl(ip);
    return;
  }
  struct in6_addr *ip = &((struct sockaddr_in6 *)name)->sin6_addr;
  if (address->family == 6) {
    memcpy(ip, address->bytes, 16);
  } else {
    memcpy(ip, MAPPED, sizeof MAPPED);
    memcpy(ip->s6_addr + 12, address->bytes, 4);
  }
}

socklen_t make_name(union name *name, sa_family_t family, uint32_t ip, uint16_t port) {
  memset(name, 0, sizeof *name);
  name->any.sa_family = family;
  put_port(&name->any, port);
  if (family == AF_INET6) {
    memcpy(&name->v6.sin6_addr, MAPPED, sizeof MAPPED);
    write_number(name->v6.sin6_addr.s6_addr + 12, ip);
    return sizeof name->v6;
  }
  name->v4.sin_addr.s_addr = htonl(ip);
  return sizeof name->v4;
}
