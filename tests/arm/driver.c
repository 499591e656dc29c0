/* Runs kernels of another machine, under qemu-user, on the memory of the process that calls them.
 *
 * That process writes calls to standard input. Its pointers are used as they are: a page that is not
 * here yet is copied from its /proc/PID/mem when it is touched, and what has changed is written back
 * after the call. Kernels must run on one thread, as the copying is not safe on several. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES (1 << 18)
#define WHOLE 16 /* integers and pointers of a call, at most */
#define REALS 4

/* Integers come first in registers and then on the stack, floats in registers of their own, so this
 * type calls functions with fewer of both in any order. */
typedef int64_t function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float,
                         float);
typedef struct {
    char name[64];
    int64_t whole[WHOLE];
    float reals[REALS];
} call;

static int memory; /* of the caller */
static struct { char *here; char before[PAGE]; } *pages;
static int count;

/* The kernels' memset too: that of glibc uses DC ZVA, and qemu 7.2 loses its first 16 bytes when it
 * faults. */
void *memset(void *to, int value, size_t size) {
    for (size_t i = 0; i < size; i++) ((volatile char *)to)[i] = (char)value;
    return to;
}

static void fail(const char *what) {
    perror(what);
    _exit(3);
}

static void fetch(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    char *const page = (char *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
    if (count == PAGES) fail("too many pages");
    if (pread(memory, pages[count].before, PAGE, (off_t)page) != PAGE) fail("an address that the caller has not");
    if (mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != page)
        fail("mmap");
    memcpy(page, pages[count].before, PAGE);
    pages[count++].here = page;
}

/* Writes only what has changed, because a page may also hold memory that is not the call's. */
static void write_back(void) {
    for (int i = 0; i < count; i++) {
        const char *const page = pages[i].here;
        for (int from = 0; from < PAGE; from++) {
            int to = from;
            while (to < PAGE && page[to] != pages[i].before[to]) to++;
            if (to > from && pwrite(memory, page + from, to - from, (off_t)(page + from)) != to - from)
                fail("pwrite");
            from = to;
        }
        munmap(pages[i].here, PAGE);
    }
    count = 0;
}

int main(int arguments, char **argument) {
    void *const kernels = arguments == 3 ? dlopen(argument[1], RTLD_NOW) : NULL;
    if (!kernels) return fprintf(stderr, "%s\n", arguments == 3 ? dlerror() : "LIBRARY MEMORY"), 2;
    if ((memory = open(argument[2], O_RDWR)) < 0) fail(argument[2]);
    if (!(pages = malloc(PAGES * sizeof *pages))) fail("malloc");
    struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    for (call c; fread(&c, sizeof c, 1, stdin) == 1;) {
        function *const f = (function *)dlsym(kernels, c.name);
        if (!f) return fprintf(stderr, "%s is missing\n", c.name), 2;
        const int64_t *const w = c.whole;
        const int64_t result = f(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12],
                                 w[13], w[14], w[15], c.reals[0], c.reals[1], c.reals[2], c.reals[3]);
        write_back();
        if (write(STDOUT_FILENO, &result, sizeof result) != sizeof result) fail("write");
    }
    return 0;
}
