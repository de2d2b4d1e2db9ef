// Carries out a launch on the calling thread, some blocks at a time.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "driver_abi.hpp"
#include "gang.hpp"

namespace sim {

enum class LaunchResult { Done, Failed, IllegalAddress };

// A launch in part carried out, in gangs.
class Grid {
 public:
  // `before`: what the grid before it in its stream stored; null where it need not wait for one.
  Grid(std::shared_ptr<const Launch> launch, std::shared_ptr<GridTrace> before);
  const Launch& launch() const { return *launch_; }
  bool done() const { return running_ == 0 && (result_ != LaunchResult::Done || all_begun()); }
  LaunchResult result() const { return result_; }
  const std::shared_ptr<GridTrace>& trace() const { return trace_; }
  uint64_t schedule() const { return schedule_; }

  bool begun() const { return next_ > 0; }
  bool all_begun() const { return next_ >= launch_->blocks(); }
  uint64_t threads_left() const { return (launch_->blocks() - next_) * launch_->threads(); }
  // The share of the device that its next gang takes.
  double gang_share() const;

 private:
  friend class Grids;
  std::unique_ptr<Gang> begin_gang(const bool* before_over);
  void end_gang(Gang& gang);

  std::shared_ptr<const Launch> launch_;
  std::shared_ptr<GridTrace> before_, trace_;
  uint64_t schedule_, next_ = 0;
  unsigned running_ = 0;  // gangs
  bool over_ = false;     // for those that wait for it by griddepcontrol
  LaunchResult result_ = LaunchResult::Done;
};

// Carries out the next gang of each of the grids, beside each other. `behind`: grids that come after the first,
// each after the one before it, and may start before that has ended; then the first is carried out whole.
void run_together(const std::vector<Grid*>& grids, const std::vector<Grid*>& behind);

// Carries out what is no kernel; an access to memory that is not there ends it with a message.
CUresult guarded(const char* what, const std::function<CUresult()>& work);

}  // namespace sim
