// Streams, events, capture and graphs.
#include <algorithm>

#include "driver.hpp"

namespace sim {
namespace {

constexpr unsigned EVENT_DISABLE_TIMING = 2;
constexpr unsigned CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2;

// What the calling thread forbids itself: cuThreadExchangeStreamCaptureMode.
unsigned& thread_capture_mode() {
  thread_local unsigned mode = CAPTURE_GLOBAL;
  return mode;
}

void end_capture(const std::shared_ptr<Capture>& capture) {
  for (Stream* s : capture->streams) {
    s->capture = nullptr;
    s->frontier.clear();
  }
  capture->ended = true;
  std::erase(driver().captures, capture);
}

void join_capture(Stream& stream, const std::shared_ptr<Capture>& capture) {
  stream.capture = capture;
  stream.frontier.clear();
  capture->streams.push_back(&stream);
}

void add_to_frontier(std::vector<size_t>& frontier, const std::vector<size_t>& nodes) {
  for (size_t node : nodes) {
    if (std::find(frontier.begin(), frontier.end(), node) == frontier.end()) frontier.push_back(node);
  }
}

// Whether some node does not come before the origin's next one: its stream was not joined.
bool has_unjoined(const Capture& capture) {
  const Nodes& nodes = capture.graph->nodes;
  std::vector<bool> before(nodes.size(), false);
  for (size_t node : capture.origin->frontier) before[node] = true;
  for (size_t i = nodes.size(); i-- > 0;) {
    if (!before[i]) return true;
    for (size_t node : nodes[i].after) before[node] = true;
  }
  return false;
}

}  // namespace

Stream* make_stream(Context* context, unsigned flags) {
  Driver& d = driver();
  auto& s = d.streams.emplace_back(std::make_unique<Stream>());
  s->context = context;
  s->flags = flags;
  s->id = d.next_id++;
  s->thread = std::this_thread::get_id();
  return s.get();
}

Stream* stream_of(CUstream handle) {
  const auto value = reinterpret_cast<uintptr_t>(handle);
  const auto device = static_cast<size_t>(current_context()->device);
  if (value <= 1) return driver().legacy[device];
  if (value == 2) {
    // Streams of threads that have ended stay: their work may not have been done.
    thread_local std::vector<Stream*> own;
    if (own.size() <= device) own.resize(device + 1, nullptr);
    if (own[device] == nullptr) own[device] = make_stream(current_context(), 0);
    return own[device];
  }
  return is_live(handle) ? handle : nullptr;
}

CUresult forbid_during_capture() {
  if (thread_capture_mode() == CAPTURE_RELAXED) return CUDA_SUCCESS;
  bool forbidden = false;
  for (const auto& capture : driver().captures) {
    // Calls that wait or allocate are unsafe while this thread captures in any mode but the relaxed one,
    // and, unless it has said that it minds its own captures only, while any captures in the global mode.
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool counts = mine ? capture->mode != CAPTURE_RELAXED
                             : capture->mode == CAPTURE_GLOBAL &&
                                   thread_capture_mode() != CAPTURE_THREAD_LOCAL;
    if (!counts) continue;
    capture->invalidated = true;
    forbidden = true;
  }
  return forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult forbid_on_capturing(Stream* stream) {
  if (stream->capture == nullptr) return CUDA_SUCCESS;
  stream->capture->invalidated = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult forbid_implicit(Stream* stream) {
  if (!stream->legacy) return CUDA_SUCCESS;
  bool forbidden = false;
  for (const auto& s : driver().streams) {
    if (s->capture == nullptr || s->context != stream->context || !s->blocking()) continue;
    s->capture->invalidated = true;
    forbidden = true;
  }
  return forbidden ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

}  // namespace sim

using namespace sim;

SIM_API cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  SIM_REQUIRE_CONTEXT();
  if (stream == nullptr || flags > 1) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  Stream* s = make_stream(current_context(), flags);
  s->priority = std::clamp(priority, -5, 0);
  driver().handles.insert(s);
  *stream = s;
  return CUDA_SUCCESS;
}
SIM_API cuStreamCreate(CUstream* stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}
// What is in its queue is still carried out.
SIM_API cuStreamDestroy_v2(CUstream stream) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (reinterpret_cast<uintptr_t>(stream) <= 2 || !is_live(stream))
    return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture != nullptr) {
    stream->capture->invalidated = true;
    std::erase(stream->capture->streams, stream);
    stream->capture = nullptr;
  }
  driver().handles.erase(stream);
  abandon(lock, stream);
  return CUDA_SUCCESS;
}
SIM_API cuStreamSynchronize(CUstream stream) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = forbid_on_capturing(s); r != CUDA_SUCCESS) return r;
  if (CUresult r = forbid_implicit(s); r != CUDA_SUCCESS) return r;
  return wait_for_stream(lock, s);
}
SIM_API cuStreamQuery(CUstream stream) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = forbid_on_capturing(s); r != CUDA_SUCCESS) return r;
  if (CUresult r = forbid_implicit(s); r != CUDA_SUCCESS) return r;
  if (!poll(lock, s->last)) return CUDA_ERROR_NOT_READY;
  return wait_for_stream(lock, s);
}
SIM_API cuStreamGetFlags(CUstream stream, unsigned* flags) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  const Stream* s = stream_of(stream);
  if (s == nullptr || flags == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *flags = s->flags;
  return CUDA_SUCCESS;
}
SIM_API cuStreamGetPriority(CUstream stream, int* priority) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  const Stream* s = stream_of(stream);
  if (s == nullptr || priority == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *priority = s->priority;
  return CUDA_SUCCESS;
}
SIM_API cuStreamGetId(CUstream stream, unsigned long long* id) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  const Stream* s = stream_of(stream);
  if (s == nullptr || id == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *id = s->id;
  return CUDA_SUCCESS;
}
SIM_API cuStreamGetCtx(CUstream stream, CUcontext* context) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  const Stream* s = stream_of(stream);
  if (s == nullptr || context == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *context = s->context;
  return CUDA_SUCCESS;
}

SIM_API cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  SIM_REQUIRE_CONTEXT();
  if (flags != 0) return flags == 1 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr || !is_live(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture == nullptr) {
    if (event->mark == nullptr) return CUDA_SUCCESS;  // never recorded
    // An event from outside cannot order work inside a capture.
    if (s->capture != nullptr) {
      s->capture->invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (CUresult r = forbid_implicit(s); r != CUDA_SUCCESS) return r;
    for (auto [id, number] : event->reach) s->reach[id] = std::max(s->reach[id], number);
    return submit(lock, s, std::make_shared<Nodes>(), {event->mark});
  }
  if (event->capture->ended) return CUDA_ERROR_CAPTURED_EVENT;
  if (event->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (s->legacy) {
    event->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (s->capture == nullptr) {
    join_capture(*s, event->capture);
  } else if (s->capture != event->capture) {
    s->capture->invalidated = event->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  add_to_frontier(s->frontier, event->frontier);
  return CUDA_SUCCESS;
}

SIM_API cuStreamBeginCapture_v2(CUstream stream, unsigned mode) {
  SIM_REQUIRE_CONTEXT();
  if (mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  // The legacy stream cannot be captured.
  if (reinterpret_cast<uintptr_t>(stream) <= 1) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (s->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->id = driver().next_id++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = s;
  join_capture(*s, capture);
  driver().captures.push_back(capture);
  return CUDA_SUCCESS;
}

SIM_API cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = s->capture;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != s) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CAPTURE_RELAXED && capture->thread != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  const bool unjoined = has_unjoined(*capture);
  end_capture(capture);
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (unjoined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  *graph = capture->graph.release();
  driver().handles.insert(*graph);
  return CUDA_SUCCESS;
}

SIM_API cuStreamIsCapturing(CUstream stream, int* status) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  const Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *status = s->capture == nullptr ? 0 : s->capture->invalidated ? 2 : 1;
  return CUDA_SUCCESS;
}
// The dependencies of the next node are not simulated: those pointers must be null.
SIM_API cuStreamGetCaptureInfo_v3(CUstream stream, int* status, unsigned long long* id,
                                  CUgraph* graph, const void** dependencies, const void** edges,
                                  size_t* count) {
  if (dependencies != nullptr || edges != nullptr || count != nullptr)
    return CUDA_ERROR_NOT_SUPPORTED;
  const CUresult r = cuStreamIsCapturing(stream, status);
  if (r != CUDA_SUCCESS) return r;
  auto lock = lock_driver();
  const Stream* s = stream_of(stream);
  if (id != nullptr) *id = s->capture != nullptr ? s->capture->id : 0;
  if (graph != nullptr) *graph = s->capture != nullptr ? s->capture->graph.get() : nullptr;
  return CUDA_SUCCESS;
}
SIM_API cuStreamGetCaptureInfo_v2(CUstream stream, int* status, unsigned long long* id,
                                  CUgraph* graph, const void** dependencies, size_t* count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, nullptr, count);
}
SIM_API cuThreadExchangeStreamCaptureMode(unsigned* mode) {
  if (mode == nullptr || *mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, thread_capture_mode());
  return CUDA_SUCCESS;
}

SIM_API cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (executable == nullptr || !is_live(graph)) return CUDA_ERROR_INVALID_VALUE;
  *executable = new Executable{std::make_shared<const Nodes>(graph->nodes), nullptr};
  driver().handles.insert(*executable);
  return CUDA_SUCCESS;
}
SIM_API cuGraphUpload(CUgraphExec graph, CUstream) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  return is_live(graph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
SIM_API cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (!is_live(graph)) return CUDA_ERROR_INVALID_VALUE;
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (s->capture != nullptr) {
    if (s->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    // A graph in a graph: its first nodes come after what is there, the next after all of it.
    Nodes& nodes = s->capture->graph->nodes;
    const size_t first = nodes.size();
    std::vector<size_t> all;
    for (Node node : *graph->nodes) {
      for (size_t& before : node.after) before += first;
      if (node.after.empty()) node.after = s->frontier;
      all.push_back(nodes.size());
      nodes.push_back(std::move(node));
    }
    if (!all.empty()) s->frontier = all;
    return CUDA_SUCCESS;
  }
  if (CUresult r = forbid_implicit(s); r != CUDA_SUCCESS) return r;
  std::vector<MarkRef> needs;
  if (graph->last != nullptr && !graph->last->done) needs.push_back(graph->last);
  // Marked before any of it is carried out: another thread may launch the same one then.
  return submit(lock, s, graph->nodes, std::move(needs), &graph->last);
}
SIM_API cuGraphDestroy(CUgraph graph) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (driver().handles.erase(graph) == 0) return CUDA_ERROR_INVALID_VALUE;
  delete graph;
  return CUDA_SUCCESS;
}
SIM_API cuGraphExecDestroy(CUgraphExec graph) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (driver().handles.erase(graph) == 0) return CUDA_ERROR_INVALID_VALUE;
  delete graph;
  return CUDA_SUCCESS;
}
SIM_API cuGraphGetNodes(CUgraph graph, void** nodes, size_t* count) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (!is_live(graph) || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (nodes != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  *count = graph->nodes.size();
  return CUDA_SUCCESS;
}

SIM_API cuEventCreate(CUevent* event, unsigned flags) {
  SIM_REQUIRE_CONTEXT();
  // CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING; events for other processes are not simulated.
  if (event == nullptr || flags > 3) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  auto* e = new Event;
  e->context = current_context();
  e->flags = flags;
  driver().handles.insert(e);
  *event = e;
  return CUDA_SUCCESS;
}
SIM_API cuEventDestroy_v2(CUevent event) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (driver().handles.erase(event) == 0) return CUDA_ERROR_INVALID_HANDLE;
  delete event;
  return CUDA_SUCCESS;
}
SIM_API cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  SIM_REQUIRE_CONTEXT();
  if (flags != 0) return flags == 1 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr || !is_live(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (event->context != s->context) return CUDA_ERROR_INVALID_HANDLE;
  if (s->capture != nullptr) {
    if (s->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture = s->capture;
    event->frontier = s->frontier;
    event->mark = nullptr;
    return CUDA_SUCCESS;
  }
  if (CUresult r = forbid_implicit(s); r != CUDA_SUCCESS) return r;
  event->capture = nullptr;
  event->reach = s->reach;
  event->reach[s->id] = s->submitted;
  return submit(lock, s, std::make_shared<Nodes>(), {}, &event->mark);
}
SIM_API cuEventRecord(CUevent event, CUstream stream) {
  return cuEventRecordWithFlags(event, stream, 0);
}

namespace {

CUresult forbid_captured(CUevent event) {
  if (event->capture == nullptr) return CUDA_SUCCESS;
  if (!event->capture->ended) event->capture->invalidated = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

}  // namespace

SIM_API cuEventQuery(CUevent event) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (!is_live(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = forbid_captured(event); r != CUDA_SUCCESS) return r;
  const MarkRef mark = event->mark;
  if (!poll(lock, mark)) return CUDA_ERROR_NOT_READY;
  return mark != nullptr ? wait_for(lock, mark) : CUDA_SUCCESS;
}
SIM_API cuEventSynchronize(CUevent event) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (!is_live(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult r = forbid_captured(event); r != CUDA_SUCCESS) return r;
  return event->mark != nullptr ? wait_for(lock, event->mark) : CUDA_SUCCESS;
}
SIM_API cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (CUevent e : {start, end}) {
    if (!is_live(e) || e->mark == nullptr || (e->flags & EVENT_DISABLE_TIMING) != 0) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
  }
  if (!start->mark->done || !end->mark->done) return CUDA_ERROR_NOT_READY;
  const auto between = end->mark->time - start->mark->time;
  *milliseconds = std::chrono::duration<float, std::milli>(between).count();
  return CUDA_SUCCESS;
}
SIM_API cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

SIM_API cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* data) {
  SIM_REQUIRE_CONTEXT();
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Work work;
  work.function = [=] {
    function(data);
    return CUDA_SUCCESS;
  };
  return submit(lock, s, std::move(work));
}

// For libcublasLt: work that takes a copy of its arguments.
extern "C" __attribute__((visibility("default"))) int sim_submit(void* stream,
                                                                 int (*work)(const void*),
                                                                 const void* arguments,
                                                                 size_t bytes) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  Stream* s = stream_of(static_cast<CUstream>(stream));
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const auto* p = static_cast<const std::byte*>(arguments);
  auto copy = std::make_shared<std::vector<std::byte>>(p, p + bytes);
  Work w;
  w.function = [=] {
    return guarded("a matrix product", [&] { return static_cast<CUresult>(work(copy->data())); });
  };
  return submit(lock, s, std::move(w));
}
extern "C" __attribute__((visibility("default"))) bool sim_is_device_range(const void* p,
                                                                           size_t bytes) {
  auto lock = lock_driver();
  return find_allocation(reinterpret_cast<uint64_t>(p), bytes) != nullptr;
}

bool sim::is_resident(const void* p, size_t bytes) {
  auto lock = lock_driver();
  return find_resident(reinterpret_cast<uint64_t>(p), bytes) != nullptr;
}
