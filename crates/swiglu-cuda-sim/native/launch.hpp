// Carries out a launch on the calling thread.
#pragma once

#include "gang.hpp"

namespace sim {

enum class LaunchResult { Done, Failed, IllegalAddress };

LaunchResult run_launch(const Launch& launch);

}  // namespace sim
