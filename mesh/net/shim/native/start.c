/* Programs that are started keep the shim: an environment that has lost its word gets ours again.
 *
 * One that has a word of its own keeps it: it is another place on the machine (a member's, say, from a process of the
 * machine's own), or, when it is empty, none at all. */
#include "shim.h"

#include <stdarg.h>
#include <unistd.h>

#define PRELOAD_NAME "LD_PRELOAD"
#define ENTRIES_MAX 16384

static size_t length_of(char *const list[]) {
  size_t count = 0;
  while (list != NULL && list[count] != NULL) count++;
  return count;
}

static bool names(const char *entry, const char *variable) {
  size_t length = strlen(variable);
  return strncmp(entry, variable, length) == 0 && entry[length] == '=';
}

/* What has to change in an environment for the shim to be in it: its two entries, and the room that they need. */
struct change {
  size_t count, preload, config;
  size_t text; /* bytes of the new LD_PRELOAD entry; 0 when the old one has us */
  bool is_told, is_none;
};

static struct change look_at(char *const list[]) {
  struct change change = {.count = length_of(list)};
  change.preload = change.config = change.count;
  for (size_t i = 0; i < change.count; i++) {
    if (names(list[i], PRELOAD_NAME)) change.preload = i;
    if (names(list[i], CONFIG_NAME)) change.config = i;
  }
  bool has_preload = change.preload < change.count;
  bool is_loaded = has_preload && strstr(list[change.preload], shim.library_path) != NULL;
  if (!is_loaded)
    change.text = sizeof PRELOAD_NAME + strlen(shim.library_path) + 2 + (has_preload ? strlen(list[change.preload]) : 0);
  change.is_told = change.config < change.count;
  bool is_left_out = change.is_told && list[change.config][sizeof CONFIG_NAME] == '\0';
  bool is_kept = is_loaded && change.is_told;
  change.is_none = shim.config_entry[0] == '\0' || is_left_out || is_kept || change.count > ENTRIES_MAX;
  return change;
}

/* `made` has room for two more than `list`, `text` for `change->text`. */
static void make_list(const struct change *change, char *const list[], char **made, char *text) {
  size_t count = change->count;
  if (count > 0) memcpy(made, list, count * sizeof *made);
  if (change->text != 0) {
    bool has_preload = change->preload < change->count;
    strcpy(text, PRELOAD_NAME "=");
    strcat(text, shim.library_path);
    if (has_preload && list[change->preload][sizeof PRELOAD_NAME] != '\0') {
      strcat(text, ":");
      strcat(text, list[change->preload] + sizeof PRELOAD_NAME);
    }
    made[has_preload ? change->preload : count++] = text;
  }
  if (!change->is_told) made[count++] = shim.config_entry;
  made[count] = NULL;
}

/* On the caller's stack, since the caller may be the child of a vfork. */
#define KEPT(list)                                              \
  struct change change = look_at(list);                         \
  char *made[change.is_none ? 1 : change.count + 3];            \
  char text[change.is_none || change.text == 0 ? 1 : change.text]; \
  char *const *kept = list;                                     \
  if (!change.is_none) {                                        \
    make_list(&change, list, made, text);                       \
    kept = made;                                                \
  }

EXPORT int execve(const char *path, char *const argv[], char *const envp[]) {
  ensure();
  KEPT(envp)
  return real.execve(path, argv, kept);
}

EXPORT int execvpe(const char *file, char *const argv[], char *const envp[]) {
  ensure();
  KEPT(envp)
  return real.execvpe(file, argv, kept);
}

EXPORT int fexecve(int fd, char *const argv[], char *const envp[]) {
  ensure();
  KEPT(envp)
  return real.fexecve(fd, argv, kept);
}

EXPORT int execveat(int fd, const char *path, char *const argv[], char *const envp[], int flags) {
  ensure();
  if (real.execveat == NULL) return refuse(ENOSYS);
  KEPT(envp)
  return real.execveat(fd, path, argv, kept, flags);
}

EXPORT int execv(const char *path, char *const argv[]) { return execve(path, argv, environ); }

EXPORT int execvp(const char *file, char *const argv[]) { return execvpe(file, argv, environ); }

#define ARGUMENTS(first)                                       \
  va_list words;                                               \
  va_start(words, first);                                      \
  size_t given = 1;                                            \
  while (va_arg(words, const char *) != NULL) given++;         \
  va_end(words);                                               \
  char *argv[given + 1];                                       \
  argv[0] = (char *)first;                                     \
  va_start(words, first);                                      \
  for (size_t i = 1; i <= given; i++) argv[i] = va_arg(words, char *);

EXPORT int execl(const char *path, const char *first, ...) {
  ARGUMENTS(first)
  va_end(words);
  return execve(path, argv, environ);
}

EXPORT int execlp(const char *file, const char *first, ...) {
  ARGUMENTS(first)
  va_end(words);
  return execvpe(file, argv, environ);
}

EXPORT int execle(const char *path, const char *first, ...) {
  ARGUMENTS(first)
  char *const *list = va_arg(words, char *const *);
  va_end(words);
  return execve(path, argv, list);
}

EXPORT int posix_spawn(pid_t *restrict pid, const char *restrict path,
                       const posix_spawn_file_actions_t *restrict actions, const posix_spawnattr_t *restrict attributes,
                       char *const argv[restrict], char *const envp[restrict]) {
  ensure();
  KEPT(envp)
  return real.posix_spawn(pid, path, actions, attributes, argv, kept);
}

EXPORT int posix_spawnp(pid_t *restrict pid, const char *restrict file,
                        const posix_spawn_file_actions_t *restrict actions, const posix_spawnattr_t *restrict attributes,
                        char *const argv[restrict], char *const envp[restrict]) {
  ensure();
  KEPT(envp)
  return real.posix_spawnp(pid, file, actions, attributes, argv, kept);
}
