/*
 * A library in front of the C library of one process (LD_PRELOAD): its wall clock steps, and what it reads, writes and
 * syncs of files by position fails or takes long, as a file that is mapped into memory says. See faultshim.py.
 *
 * CLOCK_MONOTONIC and CLOCK_BOOTTIME are left alone, as the kernel leaves them alone when somebody sets the clock.
 *
 * Writes that do not come by the C library (rustix makes its system calls itself) are caught by seccomp, if
 * TIDELOCK_FAULTS_OF_DISK is set: the handler of SIGSYS fails them, or makes them by pwritev2, which is not caught.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL

/* The same as in faultshim.py. */
struct faults {
	int64_t clock_ahead_ns;
	int64_t sync_delay_us;
	int64_t sync_fails;
	int64_t read_delay_us;
	int64_t read_fails;
	int64_t write_delay_us;
	int64_t write_fails;
	/* How often each of them was met, counted here. */
	int64_t clock_met;
	int64_t sync_delay_met;
	int64_t sync_failed;
	int64_t read_delay_met;
	int64_t read_failed;
	int64_t write_delay_met;
	int64_t write_failed;
};

static volatile struct faults none;
static volatile struct faults *faults = &none;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_fdatasync)(int);
static int (*real_fsync)(int);
static ssize_t (*real_pread64)(int, void *, size_t, off64_t);
static ssize_t (*real_pwrite64)(int, const void *, size_t, off64_t);

static void count(volatile int64_t *met)
{
	__atomic_fetch_add(met, 1, __ATOMIC_RELAXED);
}

/* As async-signal-safe as the handler needs it. */
static void wait_us(int64_t us, volatile int64_t *met)
{
	struct timespec time = { .tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000 };

	if (us) {
		count(met);
		nanosleep(&time, NULL);
	}
}

#ifdef __x86_64__
static void caught(int number, siginfo_t *info, void *context)
{
	int before = errno;
	greg_t *of = ((ucontext_t *)context)->uc_mcontext.gregs;
	long result;

	(void)number;
	wait_us(faults->write_delay_us, &faults->write_delay_met);
	if (info->si_syscall != SYS_pwritev) {
		result = -ENOSYS;
	} else if (faults->write_fails) {
		count(&faults->write_failed);
		result = -EIO;
	} else if ((result = syscall(SYS_pwritev2, of[REG_RDI], of[REG_RSI], of[REG_RDX], of[REG_R10], of[REG_R8], 0)) < 0) {
		result = -errno;
	}
	of[REG_RAX] = result;
	errno = before;
}

static void catch_writes(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pwritev, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof(filter) / sizeof(filter[0]), .filter = filter };
	struct sigaction action = { .sa_sigaction = caught, .sa_flags = SA_SIGINFO | SA_RESTART };

	if (sigaction(SIGSYS, &action, NULL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		abort();
}
#else
/* Here only what comes by the C library is caught. */
static void catch_writes(void)
{
}
#endif

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("TIDELOCK_FAULTS");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;

	real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	real_fdatasync = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
	real_fsync = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
	real_pread64 = (ssize_t (*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
	real_pwrite64 = (ssize_t (*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
	if (fd >= 0) {
		void *mapped = mmap(NULL, sizeof(struct faults), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

		if (mapped != MAP_FAILED)
			faults = mapped;
		close(fd);
	}
	if (getenv("TIDELOCK_FAULTS_OF_DISK"))
		catch_writes();
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
	int result = real_clock_gettime(clock, time);

	if (result == 0 && clock == CLOCK_REALTIME && faults->clock_ahead_ns) {
		int64_t ns = time->tv_sec * NS_PER_S + time->tv_nsec + faults->clock_ahead_ns;

		count(&faults->clock_met);
		time->tv_sec = ns / NS_PER_S;
		time->tv_nsec = ns % NS_PER_S;
	}
	return result;
}

/* The C library's own does not come by the function above. */
int gettimeofday(struct timeval *restrict time, void *restrict zone)
{
	struct timespec now;
	int result = clock_gettime(CLOCK_REALTIME, &now);

	(void)zone;
	if (result == 0) {
		time->tv_sec = now.tv_sec;
		time->tv_usec = now.tv_nsec / 1000;
	}
	return result;
}

/* Whether the call fails, after the time that it takes longer. */
static int fails(int64_t delay_us, volatile int64_t *delay_met, int64_t it_fails, volatile int64_t *failed)
{
	wait_us(delay_us, delay_met);
	if (it_fails) {
		count(failed);
		errno = EIO;
	}
	return it_fails != 0;
}

#define FAILS(what) \
	fails(faults->what##_delay_us, &faults->what##_delay_met, faults->what##_fails, &faults->what##_failed)

int fdatasync(int fd)
{
	return FAILS(sync) ? -1 : real_fdatasync(fd);
}

int fsync(int fd)
{
	return FAILS(sync) ? -1 : real_fsync(fd);
}

ssize_t pread64(int fd, void *buffer, size_t count, off64_t at)
{
	return FAILS(read) ? -1 : real_pread64(fd, buffer, count, at);
}

ssize_t pwrite64(int fd, const void *buffer, size_t count, off64_t at)
{
	return FAILS(write) ? -1 : real_pwrite64(fd, buffer, count, at);
}
