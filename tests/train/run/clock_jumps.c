/* A clock of the day that jumps by up to two hours, ten times a second, at once for all processes: loaded before C's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <semaphore.h>
#include <stdint.h>
#include <sys/time.h>
#include <time.h>

typedef int (*read_clock)(clockid_t, struct timespec *);
typedef int (*wait_semaphore)(sem_t *, const struct timespec *);

static int really(clockid_t clock, struct timespec *time) {
    static read_clock real;
    if (!real) real = (read_clock)dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, time);
}

static time_t jump(void) {
    struct timespec steady;
    really(CLOCK_MONOTONIC, &steady);
    uint64_t tenths = (uint64_t)steady.tv_sec * 10 + steady.tv_nsec / 100000000;
    return (time_t)(tenths * 6364136223846793005u >> 33) % 14400 - 7200;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int status = really(clock, time);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += jump();
    return status;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* The system, which does the waiting, has the clock that does not jump. */
int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    static wait_semaphore real;
    if (!real) real = (wait_semaphore)dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec steady = {deadline->tv_sec - jump(), deadline->tv_nsec};
    return real(semaphore, &steady);
}
