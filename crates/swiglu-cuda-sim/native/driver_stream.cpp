// Streams, events, capture and graphs.
#include <algorithm>

#include "driver.hpp"

namespace sim {
namespace {

constexpr unsigned EVENT_DISABLE_TIMING = 2;
constexpr unsigned CAPTURE_GLOBAL = 0, CAPTURE_RELAXED = 2;

void end_capture(const std::shared_ptr<Capture>& capture) {
  for (Stream* s : capture->streams) s->capture = nullptr;
  std::erase(driver().captures, capture);
}

void join_capture(Stream& stream, const std::shared_ptr<Capture>& capture) {
  stream.capture = capture;
  stream.submitted = stream.joined = 0;
  capture->streams.push_back(&stream);
}

}  // namespace

Stream* stream_of(CUstream handle) {
  const auto value = reinterpret_cast<uintptr_t>(handle);
  if (value <= 2) return driver().legacy[static_cast<size_t>(current_context()->device)].get();
  return is_live(handle) ? handle : nullptr;
}

CUresult submit(CUstream handle, Work work) {
  std::unique_lock<std::recursive_mutex> lock = lock_driver();
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture != nullptr) {
    if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->capture->graph->nodes.push_back(std::move(work));
    ++stream->submitted;
    return CUDA_SUCCESS;
  }
  lock.unlock();
  return work();
}

CUresult forbid_during_capture() {
  bool forbidden = false;
  for (const auto& capture : driver().captures) {
    // Calls that wait or allocate are unsafe while any thread captures in the global mode, and
    // while this thread captures in any mode but the relaxed one.
    const bool mine = capture->thread == std::this_thread::get_id();
    if (capture->mode == CAPTURE_RELAXED || (capture->mode != CAPTURE_GLOBAL && !mine)) continue;
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

}  // namespace sim

using namespace sim;

SIM_API cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  SIM_REQUIRE_CONTEXT();
  if (stream == nullptr || flags > 1) return CUDA_ERROR_INVALID_VALUE;
  auto lock = lock_driver();
  auto* s = new Stream;
  s->context = current_context();
  s->flags = flags;
  s->priority = std::clamp(priority, -5, 0);
  s->id = driver().next_id++;
  driver().handles.insert(s);
  *stream = s;
  return CUDA_SUCCESS;
}
SIM_API cuStreamCreate(CUstream* stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}
SIM_API cuStreamDestroy_v2(CUstream stream) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (reinterpret_cast<uintptr_t>(stream) <= 2 || !is_live(stream))
    return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture != nullptr) {
    stream->capture->invalidated = true;
    std::erase(stream->capture->streams, stream);
  }
  driver().handles.erase(stream);
  delete stream;
  return CUDA_SUCCESS;
}
SIM_API cuStreamSynchronize(CUstream stream) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return forbid_on_capturing(s);
}
SIM_API cuStreamQuery(CUstream stream) { return cuStreamSynchronize(stream); }
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

SIM_API cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr || !is_live(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture == nullptr) {
    // An event from outside cannot order work inside a capture.
    if (s->capture != nullptr && event->recorded) {
      s->capture->invalidated = true;
      return static_cast<CUresult>(905);  // CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    }
    return CUDA_SUCCESS;
  }
  if (s->capture == nullptr) {
    join_capture(*s, event->capture);
  } else if (s->capture != event->capture) {
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (s != event->stream && is_live(event->stream)) {
    event->stream->joined = std::max(event->stream->joined, event->submitted);
  }
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
  bool unjoined = false;
  for (const Stream* other : capture->streams) {
    unjoined |= other != s && other->joined < other->submitted;
  }
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
SIM_API cuThreadExchangeStreamCaptureMode(unsigned* mode) {
  thread_local unsigned current = CAPTURE_GLOBAL;
  if (mode == nullptr || *mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, current);
  return CUDA_SUCCESS;
}

SIM_API cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (executable == nullptr || !is_live(graph)) return CUDA_ERROR_INVALID_VALUE;
  *executable = new Graph(*graph);
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
  std::unique_lock<std::recursive_mutex> lock = lock_driver();
  if (!is_live(graph)) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<Work> nodes = graph->nodes;
  lock.unlock();
  return submit(stream, [nodes] {
    for (const Work& node : nodes) {
      if (CUresult r = node(); r != CUDA_SUCCESS) return r;
    }
    return CUDA_SUCCESS;
  });
}
SIM_API cuGraphDestroy(CUgraph graph) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (driver().handles.erase(graph) == 0) return CUDA_ERROR_INVALID_VALUE;
  delete graph;
  return CUDA_SUCCESS;
}
SIM_API cuGraphExecDestroy(CUgraphExec graph) { return cuGraphDestroy(graph); }
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
  if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
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
SIM_API cuEventRecord(CUevent event, CUstream stream) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  Stream* s = stream_of(stream);
  if (s == nullptr || !is_live(event)) return CUDA_ERROR_INVALID_HANDLE;
  event->capture = s->capture;
  event->stream = s;
  event->submitted = s->submitted;
  event->recorded = s->capture == nullptr;
  event->time = std::chrono::steady_clock::now();
  return CUDA_SUCCESS;
}
SIM_API cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned) {
  return cuEventRecord(event, stream);
}
SIM_API cuEventQuery(CUevent event) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (!is_live(event)) return CUDA_ERROR_INVALID_HANDLE;
  return event->capture != nullptr ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}
SIM_API cuEventSynchronize(CUevent event) { return cuEventQuery(event); }
SIM_API cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  SIM_REQUIRE_CONTEXT();
  auto lock = lock_driver();
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (CUevent e : {start, end}) {
    if (!is_live(e) || !e->recorded || (e->flags & EVENT_DISABLE_TIMING) != 0) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return CUDA_SUCCESS;
}
SIM_API cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

SIM_API cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* data) {
  SIM_REQUIRE_CONTEXT();
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return submit(stream, [=] {
    function(data);
    return CUDA_SUCCESS;
  });
}

// For libcublasLt: work that takes a copy of its arguments.
extern "C" __attribute__((visibility("default"))) int sim_submit(void* stream,
                                                                 int (*work)(const void*),
                                                                 const void* arguments,
                                                                 size_t bytes) {
  SIM_REQUIRE_CONTEXT();
  const auto* p = static_cast<const std::byte*>(arguments);
  auto copy = std::make_shared<std::vector<std::byte>>(p, p + bytes);
  return submit(static_cast<CUstream>(stream),
                [=] { return static_cast<CUresult>(work(copy->data())); });
}
extern "C" __attribute__((visibility("default"))) bool sim_is_device_range(const void* p,
                                                                           size_t bytes) {
  auto lock = lock_driver();
  return find_allocation(reinterpret_cast<uint64_t>(p), bytes) != nullptr;
}
