// What threads of one process can write to RDMA devices: the limit beside benchmarks/verbs.py.
//
//     verbs_limit [-s BYTES] [-n COUNT] [-l LIST] [-q EVERY] [-d DEPTH] [-e] [-t] FROM:TO [FROM:TO ...]
//
// COUNT writes of BYTES from each device FROM to its TO, both of this machine, as ib_write_bw makes them: DEPTH at most
// are under way, LIST of them are handed over in one call, and every EVERY-th is signalled. One thread posts to all
// pairs in turns and polls them; with -e it sleeps until a completion comes, with -t each pair has a thread of its own.
// Prints bytes per second of all pairs together, until the last write is confirmed.
#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { kMostPairs = 8, kMostList = 64, kGid = 1 };  // index 1 is the IPv4 address in the guest

struct End {
  struct ibv_context* context;
  struct ibv_pd* pd;
  struct ibv_comp_channel* channel;
  struct ibv_cq* cq;
  struct ibv_qp* qp;
  struct ibv_mr* mr;
  union ibv_gid gid;
  enum ibv_mtu mtu;
};

struct Pair {
  struct End from;
  struct End to;
  long posted;
  long done;
  long signalled;
};

static long nbytes = 64 << 10;
static long count = 192;
static long list = 1;
static long every = 1;
static long depth = 128;
static int sleeps = 0;
static struct Pair pairs[kMostPairs];

static void Need(int good, const char* what) {
  if (good) return;
  perror(what);
  exit(1);
}

static void Open(struct End* end, const char* name) {
  int n = 0;
  struct ibv_device** devices = ibv_get_device_list(&n);
  Need(devices != NULL, "ibv_get_device_list");
  struct ibv_device* found = NULL;
  for (int i = 0; i < n; ++i) {
    if (strcmp(ibv_get_device_name(devices[i]), name) == 0) found = devices[i];
  }
  if (found == NULL) {
    fprintf(stderr, "verbs_limit: no device %s\n", name);
    exit(1);
  }
  Need((end->context = ibv_open_device(found)) != NULL, "ibv_open_device");
  ibv_free_device_list(devices);
  Need((end->pd = ibv_alloc_pd(end->context)) != NULL, "ibv_alloc_pd");
  Need((end->channel = ibv_create_comp_channel(end->context)) != NULL, "ibv_create_comp_channel");
  Need((end->cq = ibv_create_cq(end->context, (int)depth, NULL, end->channel, 0)) != NULL, "ibv_create_cq");
  const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  void* memory = aligned_alloc(4096, ((size_t)nbytes + 4095) / 4096 * 4096);
  Need(memory != NULL, "aligned_alloc");
  memset(memory, 1, (size_t)nbytes);
  Need((end->mr = ibv_reg_mr(end->pd, memory, (size_t)nbytes, access)) != NULL, "ibv_reg_mr");
  struct ibv_qp_init_attr init = {.send_cq = end->cq, .recv_cq = end->cq, .qp_type = IBV_QPT_RC};
  init.cap.max_send_wr = (unsigned)depth;
  init.cap.max_recv_wr = 1;
  init.cap.max_send_sge = 1;
  init.cap.max_recv_sge = 1;
  Need((end->qp = ibv_create_qp(end->pd, &init)) != NULL, "ibv_create_qp");
  struct ibv_port_attr port;
  Need(ibv_query_port(end->context, 1, &port) == 0, "ibv_query_port");
  Need(ibv_query_gid(end->context, 1, kGid, &end->gid) == 0, "ibv_query_gid");
  end->mtu = port.active_mtu;
}

static void Connect(struct End* end, const struct End* peer) {
  struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
  Need(ibv_modify_qp(end->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
       "INIT");
  struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = end->mtu, .dest_qp_num = peer->qp->qp_num};
  rtr.max_dest_rd_atomic = 1;
  rtr.min_rnr_timer = 12;
  rtr.ah_attr.is_global = 1;
  rtr.ah_attr.port_num = 1;
  rtr.ah_attr.grh.dgid = peer->gid;
  rtr.ah_attr.grh.sgid_index = kGid;
  rtr.ah_attr.grh.hop_limit = 64;
  const int to_rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  Need(ibv_modify_qp(end->qp, &rtr, to_rtr) == 0, "RTR");
  struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
  const int to_rts =
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  Need(ibv_modify_qp(end->qp, &rts, to_rts) == 0, "RTS");
}

// One list of writes, if there is room for it.
static void Post(struct Pair* p) {
  const long n = count - p->posted < list ? count - p->posted : list;
  if (n == 0 || p->posted - p->done + n > depth) return;
  struct ibv_sge sge = {(uintptr_t)p->from.mr->addr, (unsigned)nbytes, p->from.mr->lkey};
  struct ibv_send_wr wrs[kMostList];
  memset(wrs, 0, (size_t)n * sizeof wrs[0]);
  for (long i = 0; i < n; ++i) {
    ++p->posted;
    wrs[i].wr_id = (uint64_t)p->posted;
    wrs[i].sg_list = &sge;
    wrs[i].num_sge = 1;
    wrs[i].opcode = IBV_WR_RDMA_WRITE;
    wrs[i].wr.rdma.remote_addr = (uintptr_t)p->to.mr->addr;
    wrs[i].wr.rdma.rkey = p->to.mr->rkey;
    wrs[i].next = i + 1 < n ? &wrs[i + 1] : NULL;
    if (p->posted % every == 0 || p->posted == count || p->posted - p->signalled >= depth / 2) {
      wrs[i].send_flags = IBV_SEND_SIGNALED;
      p->signalled = p->posted;
    }
  }
  struct ibv_send_wr* bad = NULL;
  Need(ibv_post_send(p->from.qp, wrs, &bad) == 0, "ibv_post_send");
}

// Returns whether anything was completed.
static int Poll(struct Pair* p) {
  struct ibv_wc wcs[16];
  const int n = ibv_poll_cq(p->from.cq, 16, wcs);
  Need(n >= 0, "ibv_poll_cq");
  for (int i = 0; i < n; ++i) {
    if (wcs[i].status != IBV_WC_SUCCESS) {
      fprintf(stderr, "verbs_limit: %s\n", ibv_wc_status_str(wcs[i].status));
      exit(1);
    }
    p->done = (long)wcs[i].wr_id;
  }
  return n > 0;
}

static void Sleep(struct Pair* some, int n) {
  struct pollfd fds[kMostPairs];
  int news = 0;
  for (int i = 0; i < n; ++i) {
    Need(ibv_req_notify_cq(some[i].from.cq, 0) == 0, "ibv_req_notify_cq");
    fds[i] = (struct pollfd){some[i].from.channel->fd, POLLIN, 0};
    news |= Poll(&some[i]);  // what came before that announces itself to nobody
  }
  if (!news) Need(poll(fds, (nfds_t)n, 1000) > 0, "poll");
  for (int i = 0; i < n; ++i) {
    struct ibv_cq* cq = NULL;
    void* context = NULL;
    while (ibv_get_cq_event(some[i].from.channel, &cq, &context) == 0) ibv_ack_cq_events(cq, 1);
  }
}

static void Run(struct Pair* some, int n) {
  for (;;) {
    int unfinished = 0;
    int news = 0;
    for (int i = 0; i < n; ++i) {
      const long before = some[i].posted;
      Post(&some[i]);
      news |= Poll(&some[i]) | (some[i].posted > before);
      unfinished |= some[i].done < count;
    }
    if (!unfinished) return;
    if (!news && sleeps) Sleep(some, n);
  }
}

static void* Thread(void* pair) {
  Run(pair, 1);
  return NULL;
}

static double Now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char** argv) {
  int threads = 0;
  for (int c; (c = getopt(argc, argv, "s:n:l:q:d:et")) != -1;) {
    long* numbers[] = {['s'] = &nbytes, ['n'] = &count, ['l'] = &list, ['q'] = &every, ['d'] = &depth};
    if (c == '?') return 2;
    if (c == 'e') sleeps = 1;
    if (c == 't') threads = 1;
    if (c != 'e' && c != 't') *numbers[c] = atol(optarg);
  }
  const int n = argc - optind;
  if (n < 1 || n > kMostPairs || nbytes < 1 || count < 1 || list < 1 || list > kMostList || every < 1 || depth < list) {
    fprintf(stderr, "verbs_limit: 1 to %d FROM:TO, numbers from 1, and at most %d in a list, were wanted\n", kMostPairs,
            kMostList);
    return 2;
  }
  for (int i = 0; i < n; ++i) {
    char* to = strchr(argv[optind + i], ':');
    Need(to != NULL, "FROM:TO");
    *to++ = '\0';
    struct Pair* p = &pairs[i];
    Open(&p->from, argv[optind + i]);
    Open(&p->to, to);
    Connect(&p->to, &p->from);
    Connect(&p->from, &p->to);
    Need(fcntl(p->from.channel->fd, F_SETFL, O_NONBLOCK) == 0, "fcntl");
  }
  const double start = Now();
  if (threads) {
    pthread_t each[kMostPairs];
    for (int i = 0; i < n; ++i) Need(pthread_create(&each[i], NULL, Thread, &pairs[i]) == 0, "pthread_create");
    for (int i = 0; i < n; ++i) pthread_join(each[i], NULL);
  } else {
    Run(pairs, n);
  }
  printf("%.0f\n", (double)n * (double)count * (double)nbytes / (Now() - start));
  return 0;
}
