/* What the shim was told, the table that it shares with the gateway, and the C library's own calls. */
#include "shim.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define TABLE_BYTES (HEADER_BYTES + 2 * BANK_SLOTS * sizeof(struct slot))

struct shim shim;
struct real real;

static void say(const char *what) {
  static const char name[] = "gangmesh shim: ";
  ssize_t ignored = write(2, name, sizeof name - 1);
  ignored = write(2, what, strlen(what));
  ignored = write(2, "\n", 1);
  (void)ignored;
}

static bool map_table(const char *path) {
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return false;
  struct stat found;
  void *memory = MAP_FAILED;
  if (fstat(file, &found) == 0 && (size_t)found.st_size >= TABLE_BYTES)
    memory = mmap(NULL, TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return false;
  if (memcmp(memory, MAGIC, sizeof MAGIC) != 0) {
    munmap(memory, TABLE_BYTES);
    return false;
  }
  shim.header = memory;
  shim.slots = (struct slot *)((char *)memory + HEADER_BYTES);
  return true;
}

static bool read_addresses(char *list) {
  int count = 0;
  for (const char *one; (one = strsep(&list, ",")) != NULL; count++) {
    if (count == SELF_MAX) return false;
    struct address *address = &shim.self[count];
    bool is_v6 = strchr(one, ':') != NULL;
    if (inet_pton(is_v6 ? AF_INET6 : AF_INET, one, address->bytes) != 1) return false;
    address->family = is_v6 ? 6 : 4;
  }
  return true;
}

/* `1;DEVICE;ADDRESS,ADDRESS…;PATH OF THE TABLE` */
static bool read_config(const char *text) {
  char words[TEXT_MAX - sizeof CONFIG_NAME];
  if (strlen(text) >= sizeof words) return false;
  strcpy(words, text);
  char *rest = words;
  const char *version = strsep(&rest, ";"), *device = strsep(&rest, ";");
  char *addresses = strsep(&rest, ";");
  if (rest == NULL || strcmp(version, "1") != 0 || strlen(device) >= DEVICE_MAX) return false;
  strcpy(shim.device, device);
  strcpy(shim.config_entry, CONFIG_NAME "=");
  strcat(shim.config_entry, text);
  return read_addresses(addresses) && map_table(rest);
}

#define FIND(name) real.name = (__typeof__(real.name))dlsym(RTLD_NEXT, #name)

/* Makes a program that has had the library since its start use it from now on, or tells it another place. For our own
 * agent, which learns its place when it runs already. 0 when it was understood. */
EXPORT int gangmesh_shim_take(const char *text) {
  shim.mode = BROKEN;
  memset(shim.self, 0, sizeof shim.self);
  if (shim.library_path[0] != '\0' && read_config(text)) shim.mode = ON;
  return shim.mode == ON ? 0 : -1;
}

__attribute__((constructor)) void begin(void) {
  if (real.connect != NULL) return;
  FIND(bind), FIND(accept), FIND(accept4), FIND(getsockname), FIND(getpeername);
  FIND(sendto), FIND(sendmsg), FIND(sendmmsg), FIND(getaddrinfo), FIND(getifaddrs), FIND(freeifaddrs);
  FIND(execve), FIND(execvpe), FIND(fexecve), FIND(execveat), FIND(posix_spawn), FIND(posix_spawnp);
  FIND(connect);
  Dl_info found;
  if (dladdr((void *)begin, &found) != 0 && strlen(found.dli_fname) < sizeof shim.library_path)
    strcpy(shim.library_path, found.dli_fname);
  const char *text = getenv(CONFIG_NAME);
  if (text != NULL && *text != '\0' && gangmesh_shim_take(text) != 0)
    say("what " CONFIG_NAME " says cannot be used: overlay addresses are unreachable");
}
