// Stream capture and graphs: while a stream captures, what it would enqueue becomes a node. A replay runs the nodes one
// after another, in an order that its seed picks among those that their edges allow: a driver promises no other, and
// may put all branches of a graph on one hardware queue.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "device.h"
#include "errors.h"
#include "queue.h"

namespace fake {

struct Node {
  const char* name;
  int stream;
  Body body;
  std::set<std::size_t> after;  // numbers of nodes
};

struct Graph {
  std::vector<std::shared_ptr<const Node>> nodes;
  int executable = 0;  // 1: instantiated
};

enum class CaptureMode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

struct Capture {
  int id = 0;
  CaptureMode mode = CaptureMode::kGlobal;
  std::thread::id thread;
  Stream* origin = nullptr;
  bool valid = true;
  bool open = true;  // until it is ended
  Graph graph;
  std::map<Stream*, std::set<std::size_t>> tips;  // streams in it: the nodes that what each adds next comes after
};

Error begin_capture(Stream* stream, int mode);
Error end_capture(Stream* stream, Graph** graph);
// 0 none, 1 active, 2 invalid
int capture_status(Stream* stream, int* id);
// Which calls this thread's captures and those of others forbid it; gives back what was so before.
Error exchange_capture_mode(int* mode);

// state_mutex() is held:
Error add_node(Stream* stream, const char* name, Body body);
Error refuse_default_stream(Device& device);
void invalidate(Capture& capture);
// What `stream` adds from now on comes after `nodes`.
void join_capture(Stream* stream, const std::shared_ptr<Capture>& capture, const std::set<std::size_t>& nodes);

Error instantiate(const Graph* graph, Graph** executable);
Error launch_graph(const Graph* executable, Stream* stream);
Error destroy_graph(Graph* graph);
bool known_graph(const Graph* graph, bool executable);

}  // namespace fake
