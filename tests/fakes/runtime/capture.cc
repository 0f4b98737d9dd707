#include "capture.h"

#include <algorithm>
#include <random>
#include <utility>

#include "settings.h"

namespace fake {
namespace {

std::set<Capture*>& active() {
  static auto* const captures = new std::set<Capture*>;
  return *captures;
}

std::set<Graph*>& graphs() {
  static auto* const all = new std::set<Graph*>;
  return *all;
}

std::atomic<int> next_capture{1};
thread_local CaptureMode interaction = CaptureMode::kGlobal;

// Every node must lie before what the origin would add next.
bool unjoined(const Capture& capture) {
  const auto& nodes = capture.graph.nodes;
  std::vector<bool> before(nodes.size(), false);
  for (std::size_t tip : capture.tips.at(capture.origin)) before[tip] = true;
  for (std::size_t i = nodes.size(); i-- > 0;) {
    if (!before[i]) return true;
    for (std::size_t earlier : nodes[i]->after) before[earlier] = true;
  }
  return false;
}

// One of the orders that the edges allow.
std::vector<std::shared_ptr<const Node>> shuffled(const std::vector<std::shared_ptr<const Node>>& nodes,
                                                  std::minstd_rand random) {
  std::vector<std::size_t> missing(nodes.size()), ready;
  std::vector<std::vector<std::size_t>> later(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    missing[i] = nodes[i]->after.size();
    for (std::size_t earlier : nodes[i]->after) later[earlier].push_back(i);
    if (missing[i] == 0) ready.push_back(i);
  }
  std::vector<std::shared_ptr<const Node>> order;
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    std::size_t next = ready.back();
    ready.pop_back();
    order.push_back(nodes[next]);
    for (std::size_t i : later[next]) {
      if (--missing[i] == 0) ready.push_back(i);
    }
  }
  return order;
}

}  // namespace

void invalidate(Capture& capture) { capture.valid = false; }

Error begin_capture(Stream* stream, int mode) {
  std::lock_guard lock(state_mutex());
  if (mode < 0 || mode > 2) return kInvalidValue;
  if (stream->legacy) return kCaptureUnsupported;
  if (stream->capture) return kIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->id = next_capture++;
  capture->mode = static_cast<CaptureMode>(mode);
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->tips[stream] = {};
  stream->capture = capture;
  active().insert(capture.get());
  return kOk;
}

Error end_capture(Stream* stream, Graph** graph) {
  std::lock_guard lock(state_mutex());
  *graph = nullptr;
  std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return kIllegalState;
  if (capture->origin != stream) return kCaptureUnmatched;
  if (capture->mode != CaptureMode::kRelaxed && capture->thread != std::this_thread::get_id()) {
    return kCaptureWrongThread;
  }
  bool left = unjoined(*capture);
  for (auto& [member, nodes] : capture->tips) {
    if (member->capture == capture) member->capture = nullptr;
  }
  active().erase(capture.get());
  capture->open = false;
  if (!capture->valid) return kCaptureInvalidated;
  if (left) return kCaptureUnjoined;
  *graph = *graphs().insert(new Graph(std::move(capture->graph))).first;
  return kOk;
}

int capture_status(Stream* stream, int* id) {
  std::lock_guard lock(state_mutex());
  *id = stream->capture ? stream->capture->id : 0;
  if (!stream->capture) return 0;
  return stream->capture->valid ? 1 : 2;
}

Error exchange_capture_mode(int* mode) {
  if (*mode < 0 || *mode > 2) return kInvalidValue;
  int before = static_cast<int>(interaction);
  interaction = static_cast<CaptureMode>(*mode);
  *mode = before;
  return kOk;
}

Error add_node(Stream* stream, const char* name, Body body) {
  Capture& capture = *stream->capture;
  if (!capture.valid) return kCaptureInvalidated;
  std::set<std::size_t>& tips = capture.tips[stream];
  auto& nodes = capture.graph.nodes;
  nodes.push_back(std::make_shared<Node>(Node{name, stream->id, std::move(body), std::move(tips)}));
  tips = {nodes.size() - 1};
  return kOk;
}

void join_capture(Stream* stream, const std::shared_ptr<Capture>& capture, const std::set<std::size_t>& nodes) {
  stream->capture = capture;
  capture->tips[stream].insert(nodes.begin(), nodes.end());
}

Error refuse_default_stream(Device& device) {
  for (Capture* capture : active()) {
    if (capture->origin->device != &device || (capture->origin->flags & kStreamNonBlocking)) continue;
    invalidate(*capture);
    return kCaptureImplicit;
  }
  return kOk;
}

Error refuse_capture(Stream* stream) {
  if (stream->capture) {
    invalidate(*stream->capture);
    return kCaptureUnsupported;
  }
  return stream->legacy ? refuse_default_stream(*stream->device) : kOk;
}

// Calls that may synchronise or change the device: forbidden during a global capture of any thread, and during a
// thread-local one of the same thread.
Error refuse_any_capture() {
  if (interaction == CaptureMode::kRelaxed) return kOk;
  for (Capture* capture : active()) {
    bool own = capture->thread == std::this_thread::get_id();
    if (capture->mode == CaptureMode::kRelaxed) continue;
    if (!own && (capture->mode == CaptureMode::kThreadLocal || interaction == CaptureMode::kThreadLocal)) continue;
    invalidate(*capture);
    return kCaptureUnsupported;
  }
  return kOk;
}

Error instantiate(const Graph* graph, Graph** executable) {
  std::lock_guard lock(state_mutex());
  auto copy = std::make_unique<Graph>(*graph);
  copy->executable = 1;
  *executable = *graphs().insert(copy.release()).first;
  return kOk;
}

Error launch_graph(const Graph* executable, Stream* stream) {
  static std::atomic<unsigned> launches{0};
  const unsigned device = static_cast<unsigned>(stream->device->physical);  // each in an order of its own
  std::minstd_rand random(static_cast<unsigned>(settings().seed) * 48271u + 65537u * device + ++launches);
  auto nodes = shuffled(executable->nodes, random);
  return enqueue(stream, "graph", [nodes](Execution& execution) {
    for (const auto& node : nodes) {
      Execution own(execution.device(), node->stream);
      if (Error error = node->body(own)) {
        complain("device %d: node %s of a graph failed", execution.device().ordinal, node->name);
        return error;
      }
    }
    return kOk;
  });
}

Error destroy_graph(Graph* graph) {
  std::lock_guard lock(state_mutex());
  graphs().erase(graph);
  std::unique_ptr<Graph> owned(graph);
  return kOk;
}

bool known_graph(const Graph* graph, bool executable) {
  std::lock_guard lock(state_mutex());
  auto found = graphs().find(const_cast<Graph*>(graph));
  return found != graphs().end() && ((*found)->executable != 0) == executable;
}

}  // namespace fake
