/*
 * A library in front of the C library of one process (LD_PRELOAD): its wall clock steps, and its disk syncs fail or
 * take long, as a file that is mapped into memory says. See faultshim.py.
 *
 * CLOCK_MONOTONIC and CLOCK_BOOTTIME are left alone, as the kernel leaves them alone when somebody sets the clock.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL

/* The same as in faultshim.py. */
struct faults {
	int64_t clock_ahead_ns;
	int64_t sync_delay_us;
	int64_t sync_fails;
};

static const volatile struct faults none;
static const volatile struct faults *faults = &none;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_fdatasync)(int);
static int (*real_fsync)(int);

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("TIDELOCK_FAULTS");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

	real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	real_fdatasync = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
	real_fsync = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
	if (fd >= 0) {
		void *mapped = mmap(NULL, sizeof(struct faults), PROT_READ, MAP_SHARED, fd, 0);

		if (mapped != MAP_FAILED)
			faults = mapped;
		close(fd);
	}
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
	int result = real_clock_gettime(clock, time);

	if (result == 0 && clock == CLOCK_REALTIME) {
		int64_t ns = time->tv_sec * NS_PER_S + time->tv_nsec + faults->clock_ahead_ns;

		time->tv_sec = ns / NS_PER_S;
		time->tv_nsec = ns % NS_PER_S;
	}
	return result;
}

static int sync_with(int (*real)(int), int fd)
{
	if (faults->sync_delay_us)
		usleep(faults->sync_delay_us);
	if (faults->sync_fails) {
		errno = EIO;
		return -1;
	}
	return real(fd);
}

int fdatasync(int fd)
{
	return sync_with(real_fdatasync, fd);
}

int fsync(int fd)
{
	return sync_with(real_fsync, fd);
}
