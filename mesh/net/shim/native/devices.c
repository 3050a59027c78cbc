/* Names and devices. */
#include "shim.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <stdlib.h>

/* An overlay address is one also where the machine has no other address of its family. */
EXPORT int getaddrinfo(const char *restrict node, const char *restrict service, const struct addrinfo *restrict hints,
                       struct addrinfo **restrict found) {
  ensure();
  union name name = {0};
  struct address address;
  if (shim.mode != ON || node == NULL || hints == NULL || !(hints->ai_flags & AI_ADDRCONFIG))
    return real.getaddrinfo(node, service, hints, found);
  if (inet_pton(AF_INET, node, &name.v4.sin_addr) == 1)
    name.any.sa_family = AF_INET;
  else if (inet_pton(AF_INET6, node, &name.v6.sin6_addr) == 1)
    name.any.sa_family = AF_INET6;
  if (!overlay_of(&name.any, sizeof name, &address)) return real.getaddrinfo(node, service, hints, found);
  struct addrinfo changed = *hints;
  changed.ai_flags &= ~AI_ADDRCONFIG;
  return real.getaddrinfo(node, service, &changed, found);
}

/* The overlay's device, as `getifaddrs` tells one. One block, behind the C library's own list. */
struct device_list {
  uint64_t mark;
  char name[DEVICE_MAX];
  union name addresses[SELF_MAX], masks[SELF_MAX];
  struct ifaddrs entries[SELF_MAX];
};
#define DEVICE_MARK 0x6d616e676d736869u

static struct ifaddrs *make_device(void) {
  struct device_list *list = calloc(1, sizeof *list);
  if (list == NULL) return NULL;
  list->mark = DEVICE_MARK;
  memcpy(list->name, shim.device, sizeof list->name);
  for (int i = 0; i < SELF_MAX && shim.self[i].family != 0; i++) {
    sa_family_t family = shim.self[i].family == 6 ? AF_INET6 : AF_INET;
    struct ifaddrs *entry = &list->entries[i];
    list->addresses[i].any.sa_family = list->masks[i].any.sa_family = family;
    put_address(&list->addresses[i].any, &shim.self[i]);
    if (family == AF_INET6)
      memset(&list->masks[i].v6.sin6_addr, 0xff, sizeof(struct in6_addr));
    else
      list->masks[i].v4.sin_addr.s_addr = 0xffffffffu;
    entry->ifa_name = list->name;
    entry->ifa_flags = IFF_UP | IFF_RUNNING | IFF_MULTICAST;
    entry->ifa_addr = &list->addresses[i].any;
    entry->ifa_netmask = &list->masks[i].any;
    if (i > 0) list->entries[i - 1].ifa_next = entry;
  }
  return list->entries;
}

EXPORT int getifaddrs(struct ifaddrs **found) {
  ensure();
  int done = real.getifaddrs(found);
  if (done != 0 || shim.mode != ON || shim.self[0].family == 0) return done;
  struct ifaddrs **end = found;
  while (*end != NULL) {
    if ((*end)->ifa_name != NULL && strcmp((*end)->ifa_name, shim.device) == 0) return done; /* there is a real one */
    end = &(*end)->ifa_next;
  }
  *end = make_device();
  return done;
}

EXPORT void freeifaddrs(struct ifaddrs *list) {
  ensure();
  for (struct ifaddrs **next = &list; *next != NULL; next = &(*next)->ifa_next) {
    struct device_list *ours = (struct device_list *)((char *)*next - offsetof(struct device_list, entries));
    if ((*next)->ifa_name != NULL && strcmp((*next)->ifa_name, shim.device) == 0 && (*next)->ifa_name == ours->name &&
        ours->mark == DEVICE_MARK) {
      *next = NULL;
      free(ours);
      break;
    }
  }
  if (list != NULL) real.freeifaddrs(list);
}
