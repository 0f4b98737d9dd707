#include "capture.h"

#include <algorithm>

#include "settings.h"

namespace standin {
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

// Streams that joined must be waited for by the origin before the capture ends.
bool unjoined(const Capture& capture) {
  return std::any_of(capture.tips.begin(), capture.tips.end(),
                     [&](const auto& tip) { return tip.first != capture.origin && !capture.joined.count(tip.first); });
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
  capture->tips[stream] = 0;
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
  capture.graph.nodes.push_back(std::make_shared<Node>(Node{name, stream->id, std::move(body)}));
  capture.tips[stream] = capture.graph.nodes.size();
  capture.joined.erase(stream);
  return kOk;
}

void join_capture(Stream* stream, const std::shared_ptr<Capture>& capture, Stream* recorded_on, std::size_t nodes) {
  if (stream->capture != capture) {
    stream->capture = capture;
    capture->tips[stream] = nodes;
  }
  auto tip = capture->tips.find(recorded_on);
  if (stream != recorded_on && tip != capture->tips.end() && tip->second == nodes) capture->joined.insert(recorded_on);
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
  auto nodes = executable->nodes;
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

}  // namespace standin
