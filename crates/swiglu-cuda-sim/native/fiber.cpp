#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <new>
#include <vector>

namespace sim {
namespace {

constexpr size_t PAGE = 65536;  // at least one page on every system with 4, 16 or 64 KiB pages
constexpr size_t STACK_BYTES = 256 * 1024;

}  // namespace

#if defined(__x86_64__)
// System V x86-64: rbx, rbp and r12 to r15 belong to the caller of a function.
asm(R"(
  .text
  .globl sim_switch_stack
  .hidden sim_switch_stack
  .type sim_switch_stack, @function
sim_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size sim_switch_stack, . - sim_switch_stack
)");
constexpr size_t SAVED_WORDS = 6;
constexpr size_t RETURN_WORD = 6;
#elif defined(__aarch64__)
// AAPCS64: x19 to x30 and the low halves of v8 to v15 belong to the caller of a function.
asm(R"(
  .text
  .globl sim_switch_stack
  .hidden sim_switch_stack
  .type sim_switch_stack, %function
sim_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size sim_switch_stack, . - sim_switch_stack
)");
constexpr size_t SAVED_WORDS = 20;
constexpr size_t RETURN_WORD = 11;  // x30
#else
#error "the simulator switches stacks on x86-64 and aarch64 only"
#endif

Stack::Stack() : base_(nullptr) {
  void* p = mmap(nullptr, PAGE + STACK_BYTES, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  mprotect(p, PAGE, PROT_NONE);
  base_ = static_cast<std::byte*>(p);
}

Stack::~Stack() {
  if (base_ != nullptr) munmap(base_, PAGE + STACK_BYTES);
}

void* Stack::prepare(void (*entry)()) {
  // A function is entered with the stack 16-byte aligned, on x86-64 less the return address that a
  // call would have pushed.
  auto* top = reinterpret_cast<uint64_t*>(base_ + PAGE + STACK_BYTES) - 16;
  uint64_t* frame = top - SAVED_WORDS - (RETURN_WORD == SAVED_WORDS ? 2 : 0);
  std::memset(frame, 0, reinterpret_cast<std::byte*>(top) - reinterpret_cast<std::byte*>(frame));
  frame[RETURN_WORD] = reinterpret_cast<uint64_t>(entry);
  return frame;
}

namespace {

struct Kept {
  std::deque<Stack> all;
  std::vector<Stack*> free;
};

Kept& kept() {
  thread_local Kept stacks;
  return stacks;
}

}  // namespace

Stack* take_stack() {
  Kept& k = kept();
  if (k.free.empty()) return &k.all.emplace_back();
  Stack* stack = k.free.back();
  k.free.pop_back();
  return stack;
}

void give_stack_back(Stack* stack) { kept().free.push_back(stack); }

}  // namespace sim
