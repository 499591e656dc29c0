/* Reports the mapped file of a bus error: weights are mapped pages, and reading a page that a
 * truncated file no longer has raises SIGBUS. Everything here is async-signal-safe. */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "simd.h"

static struct sigaction previous;

static void say(const char *text, size_t length) {
    while (length > 0) {
        const ssize_t written = write(STDERR_FILENO, text, length);
        if (written <= 0) return;
        text += written;
        length -= (size_t)written;
    }
}

static uintptr_t hexadecimal(const char **at) {
    uintptr_t value = 0;
    for (;; (*at)++) {
        const char c = **at;
        if (c >= '0' && c <= '9') value = value * 16 + (uintptr_t)(c - '0');
        else if (c >= 'a' && c <= 'f') value = value * 16 + (uintptr_t)(c - 'a' + 10);
        else return value;
    }
}

/* A line of /proc/self/maps starts with "begin-end ". */
static int covers(const char *line, uintptr_t address) {
    const uintptr_t begin = hexadecimal(&line);
    if (*line++ != '-') return 0;
    return begin <= address && address < hexadecimal(&line);
}

/* Writes the line of the mapping that contains the address; returns 0 if there is none. */
static int find_mapping(uintptr_t address, char *line, size_t room) {
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    char block[1024];
    size_t length = 0;
    ssize_t count;
    while (maps >= 0 && (count = read(maps, block, sizeof block)) > 0) {
        for (ssize_t i = 0; i < count; i++) {
            if (block[i] != '\n') {
                if (length < room - 1) line[length++] = block[i];
                continue;
            }
            line[length] = 0;
            length = 0;
            if (covers(line, address)) {
                close(maps);
                return 1;
            }
        }
    }
    if (maps >= 0) close(maps);
    return 0;
}

static void explain(int number, siginfo_t *info, void *context) {
    (void)context;
    static const char begin[] = "bus error in ";
    static const char end[] =
        ": a file that is served was shortened in place, or its disk failed. Replace a served file by "
        "renaming a new one over it.\n";
    char line[2048];
    const char *path = 0;
    if (find_mapping((uintptr_t)info->si_addr, line, sizeof line)) path = strchr(line, '/');
    if (!path) path = "memory without a file";
    say(begin, sizeof begin - 1);
    say(path, strlen(path));
    say(end, sizeof end - 1);
    sigaction(number, &previous, 0); /* the access is repeated and ends the process */
}

EXPORT void caravan_explain_bus_errors(void) {
    static int installed;
    if (installed++) return;
    struct sigaction action = {.sa_sigaction = explain, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &previous);
}
