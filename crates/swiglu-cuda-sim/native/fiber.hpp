// Stacks and the switch between them: a simulated thread is a stack that is left and entered at the
// operations that wait for other threads.
#pragma once

#include <cstddef>

namespace sim {

// Saves the callee-saved registers on the running stack, stores its pointer in `*from`, and goes on
// where `to` was left.
extern "C" void sim_switch_stack(void** from, void* to);

// A stack with an inaccessible page below it.
class Stack {
 public:
  Stack();
  ~Stack();
  Stack(Stack&& other) noexcept : base_(other.base_) { other.base_ = nullptr; }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  // The value to switch to in order to run `entry` on this stack; `entry` must not return.
  void* prepare(void (*entry)());

 private:
  std::byte* base_;
};

// A stack of the operating-system thread's, and its return. They are kept from launch to launch.
Stack* take_stack();
void give_stack_back(Stack* stack);

}  // namespace sim
