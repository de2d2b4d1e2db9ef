// Carries out a launch on the calling thread, some blocks at a time.
#pragma once

#include <functional>
#include <memory>

#include "driver_abi.hpp"
#include "gang.hpp"

namespace sim {

enum class LaunchResult { Done, Failed, IllegalAddress };

// A launch in part carried out: its blocks in gangs, one gang after the other.
class Grid {
 public:
  // `before`: what the grid before it in its stream stored; null where it need not wait for one.
  Grid(std::shared_ptr<const Launch> launch, std::shared_ptr<GridTrace> before);
  const Launch& launch() const { return *launch_; }
  bool done() const { return result_ != LaunchResult::Done || next_ >= launch_->blocks(); }
  LaunchResult result() const { return result_; }
  const std::shared_ptr<GridTrace>& trace() const { return trace_; }
  // Carries the next gang out.
  void step();

 private:
  std::shared_ptr<const Launch> launch_;
  std::shared_ptr<GridTrace> before_, trace_;
  uint64_t schedule_, next_ = 0;
  LaunchResult result_ = LaunchResult::Done;
};

// Carries out what is no kernel; an access to memory that is not there ends it with a message.
CUresult guarded(const char* what, const std::function<CUresult()>& work);

}  // namespace sim
