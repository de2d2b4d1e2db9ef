// Queues of streams: what is carried out when. Work of one stream is carried out in its order; that of two
// streams in any order that events and the legacy stream allow, drawn from a generator, of which every
// thread has its own. Only calls carry work out, on the calling thread: there is none in the background.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.hpp"

namespace sim {
namespace {

// A device takes about as many launches before it lets the host wait.
constexpr size_t LONGEST_QUEUE = 1024;
constexpr size_t MOST_ABANDONED = 16;

enum class Mode { Eager, Late, Random };

Mode mode_of(const char* text) {
  if (text == nullptr || *text == 0 || std::strcmp(text, "random") == 0) return Mode::Random;
  if (std::strcmp(text, "eager") == 0) return Mode::Eager;
  if (std::strcmp(text, "late") == 0) return Mode::Late;
  std::fprintf(stderr, "simulator: SWIGLU_SIM_STREAMS is %s: expected eager, late or random\n", text);
  return Mode::Random;
}

// How the calling thread's streams are run. A thread draws by itself, so that what one test of a program
// sees does not depend on those beside it.
struct Drawing {
  Mode mode;
  Random random;
  Temper last = Temper::Any;
};

Drawing& drawing() {
  static std::atomic<uint64_t> threads{0};
  thread_local Drawing own = [] {
    const char* seed = std::getenv("SWIGLU_SIM_SEED");
    const uint64_t number = seed != nullptr ? std::strtoull(seed, nullptr, 10) : 0;
    const uint64_t thread = threads.fetch_add(1);
    return Drawing{mode_of(std::getenv("SWIGLU_SIM_STREAMS")), Random(number * 7919 + thread + 1),
                   Temper::Any};
  }();
  return own;
}

Temper draw_temper() {
  Drawing& d = drawing();
  if (d.mode == Mode::Eager) return Temper::Early;
  if (d.mode == Mode::Late) return Temper::Late;
  // Half of the time as the thread's stream before, so that two are often of one temper.
  if (d.random.one_in(2)) {
    const size_t i = d.random.below(10);
    d.last = i < 2 ? Temper::Early : i < 5 ? Temper::Late : Temper::Any;
  }
  return d.last;
}

bool pending(const std::shared_ptr<Failure>& f) { return f != nullptr && !f->reported; }

bool ready(const Stream& s) {
  if (s.queue.empty() || s.running) return false;
  const auto& needs = s.queue.front().needs;
  return std::all_of(needs.begin(), needs.end(), [](const MarkRef& m) { return m->done; });
}

// Streams that the calling thread used last, of a temper, whose work can go on.
std::vector<Stream*> own_ready(Temper temper) {
  std::vector<Stream*> found;
  for (const auto& s : driver().streams) {
    const bool own = s->temper == temper && s->thread == std::this_thread::get_id();
    if (own && ready(*s)) found.push_back(s.get());
  }
  return found;
}

// A part of a task that is carried out in one go: a function, or some blocks of a kernel.
struct Part {
  Stream* stream;
  Task* task;
  size_t node;
};

std::shared_ptr<GridTrace> trace_before(const Stream& s, const Task& task, size_t node) {
  const Node& n = (*task.nodes)[node];
  if (n.after.empty()) return s.trace;
  if (n.after.size() != 1 || task.grids[n.after[0]] == nullptr) return nullptr;
  return task.grids[n.after[0]]->trace();
}

void begin_task(Stream& s, Task& task) {
  if (!task.done.empty()) return;
  const size_t nodes = task.nodes->size();
  task.done.assign(nodes, false);
  task.grids.resize(nodes);
  task.left = nodes;
  for (const MarkRef& need : task.needs) {
    if (pending(need->failure) && !pending(s.failure)) s.failure = need->failure;
  }
}

// The nodes that may be carried out next.
std::vector<size_t> next_nodes(const Task& task) {
  std::vector<size_t> next;
  for (size_t i = 0; i < task.done.size(); ++i) {
    if (task.done[i]) continue;
    const auto& after = (*task.nodes)[i].after;
    if (std::all_of(after.begin(), after.end(), [&](size_t j) { return task.done[j]; })) {
      next.push_back(i);
    }
  }
  return next;
}

Part pick(Stream& s) {
  Task& task = s.queue.front();
  begin_task(s, task);
  if (task.nodes->size() == 1 || task.left == 0) return {&s, &task, 0};
  const std::vector<size_t> next = next_nodes(task);
  return {&s, &task, next[drawing().random.below(next.size())]};
}

void end_task(Stream& s) {
  Task& task = s.queue.front();
  const MarkRef mark = task.mark;
  mark->done = true;
  mark->stream = nullptr;
  mark->time = std::chrono::steady_clock::now();
  if (pending(s.failure)) mark->failure = s.failure;
  const size_t nodes = task.nodes->size();
  if (nodes > 0 && !(*task.nodes)[nodes - 1].work.always) {
    const auto& grid = task.grids[nodes - 1];
    s.trace = grid != nullptr ? grid->trace() : nullptr;
  } else if (!task.needs.empty()) {
    s.trace = nullptr;
  }
  s.queue.pop_front();
}

void remove(Stream* stream) {
  auto& all = driver().streams;
  if (pending(stream->failure)) {
    stream->context->orphans.emplace_back(stream->thread, stream->failure);
  }
  std::erase_if(all, [&](const auto& s) { return s.get() == stream; });
}

// Of a part that has been carried out: what it gave.
void note(const Part& part, CUresult result) {
  Stream& s = *part.stream;
  Task& task = *part.task;
  if (result != CUDA_SUCCESS && !pending(s.failure)) {
    s.failure = std::make_shared<Failure>(Failure{result, false});
  }
  if (task.left == 0 || task.done[part.node]) return;
  const auto& grid = task.grids[part.node];
  if (grid == nullptr || grid->done()) {
    task.done[part.node] = true;
    --task.left;
  }
}

// The same, and the end of the stream's turn. Tasks that may start before others have ended end after them.
void account(const Part& part, CUresult result) {
  Stream& s = *part.stream;
  note(part, result);
  s.running = false;
  const auto over = [](const Task& task) { return !task.done.empty() && task.left == 0; };
  if (part.task->nodes->empty()) end_task(s);
  while (!s.queue.empty() && over(s.queue.front())) end_task(s);
  if (s.destroyed && s.queue.empty()) remove(&s);
}

CUresult result_of(const Grid& grid) {
  if (!grid.done()) return CUDA_SUCCESS;
  const bool intact = check_guards(("after kernel " + grid.launch().name).c_str());
  if (grid.result() == LaunchResult::Failed) return CUDA_ERROR_LAUNCH_FAILED;
  return grid.result() == LaunchResult::Done && intact ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

const Work& work_of(const Part& part) { return (*part.task->nodes)[part.node].work; }

Grid* grid_of(const Part& part) {
  auto& grid = part.task->grids[part.node];
  if (grid == nullptr) {
    const auto before = trace_before(*part.stream, *part.task, part.node);
    grid = std::make_unique<Grid>(work_of(part).kernel, before);
  }
  return grid.get();
}

bool is_kernel(const Part& part) {
  return part.task->left > 0 && work_of(part).kernel != nullptr && !pending(part.stream->failure);
}

// Whether a grid's next gang can be on the device beside others.
bool fits_beside(const std::vector<Part>& parts, const Part& other) {
  double share = grid_of(other)->gang_share();
  for (const Part& part : parts) share += grid_of(part)->gang_share();
  return share <= 1.0;
}

// Kernels of other streams of the calling thread, and of other branches of the same graph, that are carried out
// beside one, by the toss of a coin.
void add_beside(std::vector<Part>& parts) {
  Drawing& d = drawing();
  constexpr size_t MOST_BESIDE = 3;
  if (d.mode != Mode::Random || d.random.one_in(4)) return;
  const Part first = parts[0];
  for (size_t node : next_nodes(*first.task)) {
    const Part part{first.stream, first.task, node};
    if (node == first.node || parts.size() >= MOST_BESIDE || !is_kernel(part)) continue;
    if (fits_beside(parts, part)) parts.push_back(part);
  }
  for (Stream* s : own_ready(Temper::Any)) {
    if (s == first.stream || parts.size() >= MOST_BESIDE) continue;
    const Part part = pick(*s);
    if (is_kernel(part) && fits_beside(parts, part)) parts.push_back(part);
  }
}

// The kernels behind one in its stream, or its graph, that may start before it has ended.
std::vector<Part> programmatic_behind(const Part& first) {
  constexpr size_t LONGEST_CHAIN = 3;
  constexpr uint64_t MOST_THREADS = 4096;
  std::vector<Part> chain;
  Drawing& d = drawing();
  if (d.mode != Mode::Random || !d.random.one_in(2)) return chain;
  uint64_t threads = grid_of(first)->threads_left();
  double share = grid_of(first)->launch().device_share(sm_count());
  Part last = first;
  while (chain.size() + 1 < LONGEST_CHAIN) {
    Part next = last;
    const Nodes& nodes = *last.task->nodes;
    if (last.node + 1 < nodes.size()) {
      ++next.node;
      const bool alone = nodes[next.node].after == std::vector<size_t>{last.node};
      if (!alone) break;
    } else {
      // Nothing but kernels on both sides of the border of two tasks.
      if (nodes.size() > 1 && next_nodes(*last.task) != std::vector<size_t>{last.node}) break;
      const auto& queue = last.stream->queue;
      size_t at = 0;
      while (&queue[at] != last.task) ++at;
      if (at + 1 >= queue.size()) break;
      next.task = &last.stream->queue[at + 1];
      next.node = 0;
      if (next.task->nodes->size() != 1 || !next.task->needs.empty()) break;
      begin_task(*last.stream, *next.task);
    }
    const Work& work = work_of(next);
    if (work.kernel == nullptr || !work.kernel->programmatic) break;
    // A cooperative launch starts when all of it fits.
    share += work.kernel->device_share(sm_count());
    if (work.kernel->cooperative && share > 1.0) break;
    threads += work.kernel->blocks() * work.kernel->threads();
    if (threads > MOST_THREADS) break;
    chain.push_back(next);
    last = next;
  }
  return chain;
}

CUresult carry_out_kernels(Lock& lock, std::vector<Part>& parts) {
  const Part first = parts[0];
  const std::vector<Part> behind = programmatic_behind(first);
  if (behind.empty()) add_beside(parts);
  std::vector<Grid*> grids, chain;
  for (const Part& part : parts) grids.push_back(grid_of(part));
  Grid* before = grids[0];
  for (const Part& part : behind) {
    auto& grid = part.task->grids[part.node];
    grid = std::make_unique<Grid>(work_of(part).kernel, before->trace());
    before = grid.get();
    chain.push_back(before);
  }
  for (const Part& part : parts) part.stream->running = true;
  lock.unlock();
  run_together(grids, chain);
  std::vector<CUresult> results;
  for (Grid* grid : grids) results.push_back(result_of(*grid));
  for (Grid* grid : chain) results.push_back(result_of(*grid));
  lock.lock();
  // A failure of the first is the stream's, not what it made of those behind.
  note(first, results[0]);
  for (size_t i = 1; i < parts.size(); ++i) account(parts[i], results[i]);
  for (size_t i = 0; i < behind.size(); ++i) {
    // What had no time to start is not begun.
    if (!chain[i]->begun()) {
      behind[i].task->grids[behind[i].node] = nullptr;
    } else {
      note(behind[i], results[parts.size() + i]);
    }
  }
  return results[0];
}

// Carries the next part of a stream's work out. The stream is ready.
void step(Lock& lock, Stream& s) {
  const Part part = pick(s);
  s.running = true;
  CUresult result = CUDA_SUCCESS;
  if (part.task->left > 0) {
    const Work& work = work_of(part);
    // A context that has failed carries nothing out any more; but what waits for the end of work may go on.
    const bool skipped = pending(s.failure) && !work.always;
    Context* const before = current_context();
    current_context() = s.context;
    if (skipped) {
      part.task->grids[part.node] = nullptr;
    } else if (work.kernel != nullptr) {
      std::vector<Part> parts{part};
      result = carry_out_kernels(lock, parts);
    } else if (work.function != nullptr) {
      if (work.locked) {
        result = work.function();
      } else {
        lock.unlock();
        result = work.function();
        lock.lock();
      }
    }
    current_context() = before;
  }
  account(part, result);
  driver().changed.notify_all();
}

// A stream whose next part brings the end of `mark` nearer; null where another thread carries one out.
Stream* toward(const Mark& mark) {
  const Mark* m = &mark;
  for (;;) {
    Stream* s = m->stream;
    if (s->running) return nullptr;
    std::vector<const Mark*> missing;
    for (const MarkRef& need : s->queue.front().needs) {
      if (!need->done) missing.push_back(need.get());
    }
    if (missing.empty()) return s;
    m = missing[missing.size() > 1 ? drawing().random.below(missing.size()) : 0];
  }
}

void run_early(Lock& lock) {
  for (;;) {
    const std::vector<Stream*> early = own_ready(Temper::Early);
    if (early.empty()) return;
    step(lock, *early[drawing().random.below(early.size())]);
  }
}

bool step_any(Lock& lock) {
  const std::vector<Stream*> any = own_ready(Temper::Any);
  if (any.empty()) return false;
  step(lock, *any[drawing().random.below(any.size())]);
  return true;
}

void drive(Lock& lock, const MarkRef& mark) {
  Drawing& d = drawing();
  // Of some calls the other streams are as far as this one when they return, of some no further.
  constexpr unsigned ONE_IN[] = {0, 0, 4, 2};
  const unsigned others = d.mode == Mode::Random ? ONE_IN[d.random.below(4)] : 0;
  while (!mark->done) {
    if (d.mode == Mode::Random) run_early(lock);
    if (others != 0 && d.random.one_in(others)) step_any(lock);
    if (mark->done) return;
    if (Stream* s = toward(*mark)) {
      step(lock, *s);
    } else {
      driver().changed.wait(lock);
    }
  }
}

void after_submission(Lock& lock, Stream& s, const MarkRef& mark) {
  Drawing& d = drawing();
  if (d.mode == Mode::Eager) return drive(lock, mark);
  if (d.mode == Mode::Random) {
    run_early(lock);
    if (!mark->done && s.temper == Temper::Any && d.random.one_in(2)) {
      while (step_any(lock) && !d.random.one_in(3)) {
      }
    }
  }
  // Not `s`: it may be gone.
  while (!mark->done && mark->stream->queue.size() > LONGEST_QUEUE) {
    drive(lock, mark->stream->queue.front().mark);
  }
}

CUresult report(const std::shared_ptr<Failure>& failure) {
  if (!pending(failure)) return CUDA_SUCCESS;
  failure->reported = true;
  return failure->code;
}

CUresult report_orphans(Context& context) {
  for (size_t i = 0; i < context.orphans.size(); ++i) {
    if (context.orphans[i].first != std::this_thread::get_id()) continue;
    const std::shared_ptr<Failure> failure = context.orphans[i].second;
    context.orphans.erase(context.orphans.begin() + static_cast<std::ptrdiff_t>(i));
    return report(failure);
  }
  return CUDA_SUCCESS;
}

void reach_further(Reach& reach, const Stream& other) {
  for (auto [id, number] : other.reach) reach[id] = std::max(reach[id], number);
  reach[other.id] = std::max(reach[other.id], other.submitted);
}

// The legacy stream and the blocking streams of its context wait for each other.
void add_implicit_needs(Stream& s, std::vector<MarkRef>& needs) {
  if (!s.blocking()) return;
  for (const auto& other : driver().streams) {
    const bool related = other.get() != &s && other->context == s.context && other->blocking() &&
                         other->legacy != s.legacy;
    if (!related) continue;
    reach_further(s.reach, *other);
    if (other->last != nullptr && !other->last->done) needs.push_back(other->last);
  }
}

}  // namespace

bool stream_toss(unsigned n) {
  Drawing& d = drawing();
  return d.mode == Mode::Random && d.random.one_in(n);
}

CUresult submit(Lock& lock, Stream* stream, std::shared_ptr<const Nodes> nodes,
                std::vector<MarkRef> needs, MarkRef* mark) {
  add_implicit_needs(*stream, needs);
  if (stream->queue.empty()) stream->temper = draw_temper();
  auto end = std::make_shared<Mark>();
  end->stream = stream;
  end->thread = std::this_thread::get_id();
  stream->thread = end->thread;
  stream->last = end;
  ++stream->submitted;
  Task& task = stream->queue.emplace_back();
  task.nodes = std::move(nodes);
  task.needs = std::move(needs);
  task.mark = end;
  if (mark != nullptr) *mark = end;
  after_submission(lock, *stream, end);
  return CUDA_SUCCESS;
}

CUresult submit(Lock& lock, Stream* stream, Work work, MarkRef* mark) {
  if (stream->capture != nullptr) {
    if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    Nodes& nodes = stream->capture->graph->nodes;
    nodes.push_back({std::move(work), stream->frontier});
    stream->frontier = {nodes.size() - 1};
    return CUDA_SUCCESS;
  }
  if (CUresult r = forbid_implicit(stream); r != CUDA_SUCCESS) return r;
  auto nodes = std::make_shared<Nodes>();
  nodes->push_back({std::move(work), {}});
  return submit(lock, stream, std::move(nodes), {}, mark);
}

CUresult wait_for(Lock& lock, MarkRef mark) {
  Context& context = *current_context();
  drive(lock, mark);
  if (CUresult r = report(mark->failure); r != CUDA_SUCCESS) return r;
  return report_orphans(context);
}

CUresult wait_for_stream(Lock& lock, Stream* stream) {
  const uint64_t id = stream->id;
  std::vector<MarkRef> marks;
  if (stream->last != nullptr) marks.push_back(stream->last);
  // Nothing is submitted; but the legacy stream's end is that of all blocking streams.
  if (stream->legacy) add_implicit_needs(*stream, marks);
  for (const MarkRef& mark : marks) {
    if (CUresult r = wait_for(lock, mark); r != CUDA_SUCCESS) return r;
  }
  for (const auto& s : driver().streams) {
    if (s->id == id) {
      if (CUresult r = report(s->failure); r != CUDA_SUCCESS) return r;
    }
  }
  return report_orphans(*current_context());
}

CUresult wait_for_context(Lock& lock, Context* context) {
  std::vector<MarkRef> marks;
  for (const auto& s : driver().streams) {
    if (s->context == context && s->last != nullptr) marks.push_back(s->last);
  }
  for (size_t i = marks.size(); i > 1; --i) {
    std::swap(marks[i - 1], marks[drawing().random.below(i)]);
  }
  CUresult first = CUDA_SUCCESS;
  for (const MarkRef& mark : marks) {
    drive(lock, mark);
    if (!pending(mark->failure) || first != CUDA_SUCCESS) continue;
    first = mark->failure->code;
    // Another thread's failure is still to be seen by that thread.
    if (mark->thread == std::this_thread::get_id()) mark->failure->reported = true;
  }
  return first != CUDA_SUCCESS ? first : report_orphans(*context);
}

bool poll(Lock& lock, const MarkRef& mark) {
  if (mark == nullptr || mark->done) return true;
  // A program that asks again and again comes to the end.
  if (drawing().random.one_in(2)) {
    if (Stream* s = toward(*mark)) step(lock, *s);
  }
  return mark->done;
}

void abandon(Lock& lock, Stream* stream) {
  stream->destroyed = true;
  if (stream->queue.empty() && !stream->running) return remove(stream);
  if (stream_toss(2) || drawing().mode == Mode::Eager) return drive(lock, stream->last);
  const auto& all = driver().streams;
  const auto gone = [](const auto& s) { return s->destroyed && !s->queue.empty(); };
  if (static_cast<size_t>(std::count_if(all.begin(), all.end(), gone)) > MOST_ABANDONED) {
    const auto oldest = std::find_if(all.begin(), all.end(), gone);
    const MarkRef last = (*oldest)->last;
    drive(lock, last);
  }
}

}  // namespace sim

// For tests of programs: how the calling thread's streams are run from now on.
extern "C" __attribute__((visibility("default"))) void sim_set_streams(const char* mode,
                                                                       uint64_t seed) {
  sim::drawing() = {sim::mode_of(mode), sim::Random(seed), sim::Temper::Any};
}
