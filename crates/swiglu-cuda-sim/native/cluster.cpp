// Clusters (PTX ISA 9.7.13.4, barrier.cluster; 9.7.9.24, mapa): the blocks of a gang.
#include <cstring>

#include "gang.hpp"

namespace sim {
namespace {

// An address of the cluster's shared memory is that of the block's own, with the block above it.
constexpr unsigned RANK_SHIFT = 24;

void wake_cluster(Gang& g) {
  std::vector<Thread*> waiting;
  waiting.swap(g.cluster_waiters);
  for (Thread* t : waiting) wake(*t);
}

}  // namespace

Block& cluster_block(unsigned rank, const char* operation) {
  Gang& g = gang();
  if (rank >= g.blocks.size()) {
    fault("%s with block %u of a cluster of %zu", operation, rank, g.blocks.size());
  }
  Block& block = g.blocks[rank];
  if (block.live == 0) fault("%s with block %u of its cluster, which has ended", operation, rank);
  return block;
}

// Threads that have ended are not waited for (9.7.13.4), nor do they count among those that have arrived.
void release_cluster_barrier(Gang& g) {
  if (g.cluster_arrived == 0 || g.cluster_arrived < g.live) return;
  g.cluster_arrived = 0;
  ++g.cluster_rounds;
  wake_cluster(g);
}

}  // namespace sim

using namespace sim;

extern "C" {

unsigned sim_cluster_rank() {
  const Gang& g = gang();
  unsigned rank = 0;
  while (&g.blocks[rank] != self().block) ++rank;
  return rank;
}

unsigned sim_cluster_address(unsigned address, unsigned rank) {
  cluster_block(rank, "mapa");
  return (rank + 1) << RANK_SHIFT | address;
}

// PTX ISA 9.7.9.8 (ld.shared::cluster).
unsigned sim_load_shared_cluster(unsigned address) {
  const unsigned rank = address >> RANK_SHIFT;
  if (rank == 0) fault("ld.shared::cluster at %u, an address of the block", address);
  Block& block = cluster_block(rank - 1, "ld.shared::cluster");
  const uint32_t within = address & ((1u << RANK_SHIFT) - 1);
  unsigned value;
  std::memcpy(&value, shared_at(block, within, 4, 4, "ld.shared::cluster"), 4);
  return value;
}

// PTX ISA 9.7.9.12 (st.async): the data lands before its bytes complete, some time later.
void sim_store_shared_cluster(unsigned address, const unsigned* words, unsigned barrier) {
  const unsigned rank = address >> RANK_SHIFT;
  if (rank == 0 || barrier >> RANK_SHIFT != rank) {
    fault("st.async at %u with the barrier at %u: expected addresses of one block of the cluster",
          address, barrier);
  }
  Block& block = cluster_block(rank - 1, "st.async");
  constexpr unsigned WITHIN = (1u << RANK_SHIFT) - 1;
  require_barrier(block, barrier & WITHIN, "st.async");
  shared_at(block, address & WITHIN, 8, 8, "st.async");
  BulkLoad store{&block, &self(), {}, address & WITHIN, barrier & WITHIN, 0, 0};
  std::memcpy(&store.value, words, 8);
  store.stores = true;
  gang().loads.push_back(store);
  maybe_yield();
}

void sim_cluster_arrive() {
  Gang& g = gang();
  if (self().cluster_pending) fault("barrier.cluster.arrive twice without barrier.cluster.wait");
  self().cluster_pending = true;
  self().cluster_round = g.cluster_rounds + 1;
  ++g.cluster_arrived;
  release_cluster_barrier(g);
  maybe_yield();
}

void sim_cluster_wait() {
  Gang& g = gang();
  if (!self().cluster_pending) fault("barrier.cluster.wait without barrier.cluster.arrive");
  self().cluster_pending = false;
  while (self().cluster_round > g.cluster_rounds) {
    g.cluster_waiters.push_back(&self());
    wait_until_woken("barrier.cluster.wait");
  }
}

void sim_barrier_arrive_cluster(unsigned barrier) {
  const unsigned rank = barrier >> RANK_SHIFT;
  if (rank == 0) fault("mbarrier.arrive.shared::cluster at %u, an address of the block", barrier);
  Block& block = cluster_block(rank - 1, "mbarrier.arrive.shared::cluster");
  arrive(block, barrier & ((1u << RANK_SHIFT) - 1), 0);
  maybe_yield();
}

}  // extern "C"
