/* The shim: overlay addresses for a program on a machine where nobody may redirect connections.
 *
 * Loaded by LD_PRELOAD, told by GANGMESH_SHIM (environment.py writes it). Rules of these files:
 * 1. Only overlay addresses (198.18.0.0/15, fd67:6d00::/32) are touched. Whatever names another address goes to the C
 *    library as it came. Calls that carry bytes and name nobody are not here at all, so a byte costs nothing.
 * 2. The program's own socket is connected, to the gateway's loopback listener: options, epoll, dup, fork and
 *    non-blocking connects are the kernel's business, as ever. What it was meant for stands in a slot of a table that
 *    is shared with the gateway (table.py), found by the connection's own address and port: nothing is sent, nothing is
 *    awaited, and it is found again after a fork or an exec. Who may write the table is who may speak.
 * 3. An own overlay address is an address of loopback, found by arithmetic (addresses.c); a peer's is the source of
 *    what the gateway delivers here. So both can be told again without a memory.
 * 4. Nothing allocates, locks or prints in a call that a signal handler or the child of a vfork may make.
 * 5. What cannot be done here is refused with an errno, never passed on: it would leave the machine in the clear.
 */
#ifndef GANGMESH_SHIM_H
#define GANGMESH_SHIM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <spawn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#define EXPORT __attribute__((visibility("default")))
#define CONFIG_NAME "GANGMESH_SHIM"

/* ---- what table.py and addresses.py have too ---------------------------------------------------------------------- */

#define MAGIC "gmshim1"
#define HEADER_BYTES 4096
#define BANK_SLOTS 65536
#define GATEWAY_IP 0x7fc80001u /* 127.200.0.1, where the gateway listens */
#define SOURCE_IP 0x7fc80002u  /* 127.200.0.2, where connections come from that the program has not bound */
#define LOOPBACK_IP 0x7f000001u

enum { EMPTY = 0, ASKED = 1, TAKEN = 2 };

/* What one connection to the gateway is meant for. The first bank of slots is for sources at SOURCE_IP, the second for
 * all others; in it the index is the source's port. */
struct slot {
  uint32_t state;
  uint32_t when_s; /* CLOCK_MONOTONIC, when it was asked */
  uint32_t source; /* network order, as all that follows */
  uint16_t port;
  uint8_t family; /* 4 or 6 */
  uint8_t unused;
  uint8_t target[16]; /* of IPv4 the first four */
};

struct header {
  char magic[8];
  uint16_t port; /* of the gateway's listener, network order; another one after a restart */
};

/* ---- state.c ------------------------------------------------------------------------------------------------------ */

#define SELF_MAX 8
#define TEXT_MAX 4096
#define DEVICE_MAX 16

struct address {
  uint8_t family; /* 4 or 6; 0: none */
  uint8_t bytes[16];
};

enum mode {
  OFF, /* no word of a gateway: every call is the C library's own */
  ON,
  BROKEN, /* told something that cannot be used: overlay addresses are refused */
};

struct shim {
  enum mode mode;
  volatile struct header *header;
  struct slot *slots;
  struct address self[SELF_MAX]; /* the first of a family is what an own socket is told to have */
  char device[DEVICE_MAX];
  char config_entry[TEXT_MAX]; /* GANGMESH_SHIM=…, as it was given */
  char library_path[TEXT_MAX]; /* of this library, as LD_PRELOAD has it */
};
extern struct shim shim;

/* The C library's own. */
struct real {
  int (*connect)(int, const struct sockaddr *, socklen_t);
  int (*bind)(int, const struct sockaddr *, socklen_t);
  int (*accept)(int, struct sockaddr *, socklen_t *);
  int (*accept4)(int, struct sockaddr *, socklen_t *, int);
  int (*getsockname)(int, struct sockaddr *, socklen_t *);
  int (*getpeername)(int, struct sockaddr *, socklen_t *);
  ssize_t (*sendto)(int, const void *, size_t, int, const struct sockaddr *, socklen_t);
  ssize_t (*sendmsg)(int, const struct msghdr *, int);
  int (*sendmmsg)(int, struct mmsghdr *, unsigned, int);
  int (*getaddrinfo)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
  int (*getifaddrs)(struct ifaddrs **);
  void (*freeifaddrs)(struct ifaddrs *);
  int (*execve)(const char *, char *const[], char *const[]);
  int (*execvpe)(const char *, char *const[], char *const[]);
  int (*fexecve)(int, char *const[], char *const[]);
  int (*execveat)(int, const char *, char *const[], char *const[], int);
  int (*posix_spawn)(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
                     char *const[], char *const[]);
  int (*posix_spawnp)(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
                      char *const[], char *const[]);
};
extern struct real real;

void begin(void);

/* For calls that another library makes before our turn to begin has come. */
static inline void ensure(void) {
  if (__builtin_expect(real.connect == NULL, 0)) begin();
}

static inline int refuse(int error) {
  errno = error;
  return -1;
}

/* ---- addresses.c -------------------------------------------------------------------------------------------------- */

union name {
  struct sockaddr any;
  struct sockaddr_in v4;
  struct sockaddr_in6 v6;
};

/* The overlay address that a socket's name has, IPv4 also when it is mapped into IPv6; false for any other. */
bool overlay_of(const struct sockaddr *name, socklen_t length, struct address *found);
bool is_self(const struct address *address);
/* Overlay address to loopback (in host order) and back; false when there is none. */
bool to_loopback(const struct address *address, uint32_t *ip);
bool from_loopback(uint32_t ip, struct address *found);
/* The IPv4 address in a socket's name, mapped or not, in host order; 0 when it has none. */
uint32_t ip_of(const struct sockaddr *name, socklen_t length);
uint16_t port_of(const struct sockaddr *name); /* network order */
void put_port(struct sockaddr *name, uint16_t port);
/* An IPv6 address in a name of IPv4 becomes the IPv4 address beside it. */
void put_address(struct sockaddr *name, const struct address *address);
/* A name of this family for a loopback address; its length. */
socklen_t make_name(union name *name, sa_family_t family, uint32_t ip, uint16_t port);

#endif
