// What this machine can do at best: copying, adding, loopback TCP, one shared flag. Prints one JSON object.
//
// Everything is measured by two processes, pinned to two CPUs where there are two. Bandwidths are bytes of one buffer
// divided by the time (10^9 bytes a second), so a copy of N bytes in time t is N / t although it moves 2 N.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kLine = 64, kWindow = 256 << 10 };
static const size_t kSizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};
enum { kCount = sizeof kSizes / sizeof kSizes[0] };

struct Shared {
  _Alignas(kLine) _Atomic uint64_t arrived;
  _Alignas(kLine) _Atomic uint64_t ping;
  _Alignas(kLine) _Atomic uint64_t pong;
  double copy_one[kCount], copy_both[2][kCount], add_one[kCount], add_both[2][kCount];
  double flag_us, one_way, each_way[2], latency_us;
};

static struct Shared* shared;
static int me;
static uint64_t meetings;
static pid_t child;

static void die(const char* what) {
  perror(what);
  if (child > 0) kill(child, 9);
  exit(1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// Both processes meet here.
static void meet(void) {
  meetings += 2;
  atomic_fetch_add(&shared->arrived, 1);
  for (double limit = now() + 60; atomic_load(&shared->arrived) < meetings;) {
    if (now() > limit) {
      errno = ETIMEDOUT;
      die("the other process");
    }
    sched_yield();
  }
}

static void copy(float* to, const float* from, size_t nbytes) {
  memcpy(to, from, nbytes);
  __asm__ volatile("" ::: "memory");
}

static void add(float* to, const float* from, size_t nbytes) {
  for (size_t i = 0; i < nbytes / sizeof(float); i++) to[i] += from[i];
  __asm__ volatile("" ::: "memory");
}

// The best of several spans of about 10 ms, in GB/s.
static double rate(void (*work)(float*, const float*, size_t), float* to, const float* from, size_t nbytes) {
  double best = 0;
  for (int span = 0; span < 5; span++) {
    double start = now(), spent = 0;
    size_t done = 0;
    for (; spent < 0.01; spent = now() - start, done += nbytes) work(to, from, nbytes);
    if (done / spent / 1e9 > best) best = done / spent / 1e9;
  }
  return best;
}

// Memory as NumPy's large arrays have it: in huge pages where the kernel grants them.
static float* allocate(size_t nbytes) {
  void* memory = aligned_alloc(2 << 20, nbytes);
  if (!memory) die("memory");
  madvise(memory, nbytes, MADV_HUGEPAGE);  // a kernel without them serves small ones
  memset(memory, 0, nbytes);
  return memory;
}

static void measure_memory(void) {
  float *a = allocate(kSizes[kCount - 1]), *b = allocate(kSizes[kCount - 1]);
  for (int i = 0; i < kCount; i++) {
    if (me == 0) {
      shared->copy_one[i] = rate(copy, a, b, kSizes[i]);
      shared->add_one[i] = rate(add, a, b, kSizes[i]);
    }
    meet();
    shared->copy_both[me][i] = rate(copy, a, b, kSizes[i]);
    meet();
    shared->add_both[me][i] = rate(add, a, b, kSizes[i]);
    meet();
  }
  free(a);
  free(b);
}

// One way of a flag that two CPUs hand to and fro.
static void measure_flag(void) {
  enum { kRounds = 200000 };
  meet();
  double start = now();
  for (uint64_t i = 1; i <= kRounds; i++) {
    if (me == 0) atomic_store_explicit(&shared->ping, i, memory_order_release);
    _Atomic uint64_t* wanted = me == 0 ? &shared->pong : &shared->ping;
    while (atomic_load_explicit(wanted, memory_order_acquire) < i) {
    }
    if (me == 1) atomic_store_explicit(&shared->pong, i, memory_order_release);
  }
  if (me == 0) shared->flag_us = (now() - start) / kRounds / 2 * 1e6;
}

// Before it connects or listens: whoever begins with BBR, where that is the system's choice, is paced for ever.
static int unpaced_socket(void) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  return fd;
}

static void settle(int fd) {
  int on = 1, bytes = 4 << 20;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

// A connection over 127.0.0.1; `port` was bound by process 0 before the fork.
static int connect_pair(int listener, struct sockaddr_in* address) {
  int fd;
  if (me == 0) {
    fd = accept(listener, NULL, NULL);
  } else {
    fd = unpaced_socket();
    if (fd >= 0 && connect(fd, (struct sockaddr*)address, sizeof *address)) die("connect");
  }
  if (fd < 0) die("loopback");
  settle(fd);
  if (fcntl(fd, F_SETFL, O_NONBLOCK)) die("fcntl");
  return fd;
}

// Moves `send` bytes out and `receive` bytes in, both at once, without blocking.
static void move(int fd, char* out, char* in, size_t send_left, size_t receive_left) {
  double limit = now() + 60;
  while (send_left || receive_left) {
    if (send_left) {
      ssize_t n = send(fd, out, send_left < kWindow ? send_left : kWindow, MSG_NOSIGNAL);
      if (n > 0) send_left -= n;
      if (n < 0 && errno != EAGAIN) die("send");
    }
    if (receive_left) {
      ssize_t n = recv(fd, in, receive_left < kWindow ? receive_left : kWindow, 0);
      if (n == 0) errno = ECONNRESET;
      if (n > 0) receive_left -= n;
      if (n == 0 || (n < 0 && errno != EAGAIN)) die("recv");
    }
    if (now() > limit) {
      errno = ETIMEDOUT;
      die("loopback");
    }
  }
}

static void measure_loopback(int listener, struct sockaddr_in* address) {
  enum { kTotal = 256 << 20, kRounds = 5000 };
  int fd = connect_pair(listener, address);
  char *out = calloc(1, kWindow), *in = calloc(1, kWindow);
  if (!out || !in) die("memory");
  for (int round = 0; round < 3; round++) {
    meet();
    double start = now();
    move(fd, out, in, me == 0 ? kTotal : 0, me == 1 ? kTotal : 0);
    double got = kTotal / (now() - start) / 1e9;
    if (me == 1 && got > shared->one_way) shared->one_way = got;
    meet();
    start = now();
    move(fd, out, in, kTotal, kTotal);
    got = kTotal / (now() - start) / 1e9;
    if (got > shared->each_way[me]) shared->each_way[me] = got;
  }
  meet();
  double start = now();
  for (int i = 0; i < kRounds; i++) {
    if (me == 0) move(fd, out, in, 8, 0);
    move(fd, out, in, 0, 8);
    if (me == 1) move(fd, out, in, 8, 0);
  }
  if (me == 0) shared->latency_us = (now() - start) / kRounds / 2 * 1e6;
  free(out);
  free(in);
  close(fd);
}

static void pin(void) {
  cpu_set_t all, one;
  if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) < 2) {
    errno = ENOTSUP;
    die("two CPUs");
  }
  CPU_ZERO(&one);
  for (int cpu = 0, found = 0; cpu < CPU_SETSIZE; cpu++) {
    if (CPU_ISSET(cpu, &all) && found++ == me) CPU_SET(cpu, &one);
  }
  if (sched_setaffinity(0, sizeof one, &one)) die("sched_setaffinity");
}

static double smaller(double a, double b) { return a < b ? a : b; }

static void print_sizes(const char* name, const double* one, const double* both0, const double* both1) {
  printf("\"%s\": {", name);
  for (int i = 0; i < kCount; i++) {
    printf("%s\"%zu\": {\"one\": %.3f, \"both\": %.3f}", i ? ", " : "", kSizes[i], one[i], smaller(both0[i], both1[i]));
  }
  printf("}, ");
}

int main(void) {
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) die("mmap");
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int listener = unpaced_socket();
  if (listener < 0 || bind(listener, (struct sockaddr*)&address, sizeof address) || listen(listener, 1) ||
      getsockname(listener, (struct sockaddr*)&address, &length)) {
    die("listen");
  }
  child = fork();
  if (child < 0) die("fork");
  me = child == 0;
  pin();
  measure_memory();
  measure_flag();
  measure_loopback(listener, &address);
  if (me == 1) return 0;
  int status;
  if (waitpid(child, &status, 0) < 0 || status) die("the other process");
  printf("{");
  print_sizes("memcpy_gbs", shared->copy_one, shared->copy_both[0], shared->copy_both[1]);
  print_sizes("add_gbs", shared->add_one, shared->add_both[0], shared->add_both[1]);
  printf("\"loopback_gbs\": {\"one_way\": %.3f, \"each_way\": %.3f}, ", shared->one_way,
         smaller(shared->each_way[0], shared->each_way[1]));
  printf("\"loopback_latency_us\": %.3f, \"flag_us\": %.4f}\n", shared->latency_us, shared->flag_us);
  return 0;
}
