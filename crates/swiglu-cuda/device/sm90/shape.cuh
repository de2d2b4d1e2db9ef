// The shape of Hopper's main loop (gemm.cuh) as it was compiled: tiles, teams, stages.
//
// Compile-time: ELEMENT 1|2; ORIENTATION 0 = weights [out, in], 1 = [in, out]; OPERANDS 1|2; TILE_H output columns per
// tile; CLUSTER blocks, 1 or 2, that compute tiles below each other and share the weights; STAGES; TAIL_H as above or 0;
// SHARED_BYTES as the host computed them; CONSUMERS 2|4, by default 2. M, H and K are run-time values, K > 0; TMA fills what
// lies outside with zeros, so that no extent needs padding.
#pragma once
#include "sm90/ring.cuh"

#ifndef CONSUMERS
#define CONSUMERS 2
#endif

constexpr int kTileM = 128;
constexpr int kTileK = 64;                 // 128 bytes: one row of the 128-byte swizzle
constexpr int kTileH = TILE_H;
constexpr int kOperands = OPERANDS;
constexpr int kCluster = CLUSTER;
static_assert(kCluster == 1 || kCluster == kOperands, "each block of a cluster loads one operand for all");
constexpr bool kPingPong = PING_PONG != 0;
constexpr bool kMajorN = ORIENTATION == 1;  // of the B operand

// Columns of a tile that are a row of the swizzle: of the result, and of weights [in, out].
constexpr int kPanel = kTileH % 64 == 0 ? 64 : kTileH % 32 == 0 ? 32 : 16;
constexpr int kPitch = kPanel * 2;  // bytes of that row
static_assert(kTileH % 16 == 0 && kOperands * kTileH <= 256, "whole panels; one instruction has 256 columns");

constexpr int kTailH = TAIL_H;
static_assert(kTailH == 0 || (kTailH < kTileH && kTailH % kPanel == 0), "whole panels, as those of full tiles");

constexpr int kConsumers = CONSUMERS;  // warpgroups
constexpr int kConsumersPerTile = kPingPong ? kConsumers / 2 : kConsumers;  // those of a team
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRowsPerConsumer = kTileM / kConsumersPerTile;
constexpr int kBlocks = kRowsPerConsumer / 64;  // of the rows of one instruction
static_assert(kBlocks > 0 && kRowsPerConsumer % 64 == 0, "rows of whole instructions");

constexpr int kXBytes = kTileM * kTileK * 2;
constexpr int kOperandBytes = kTileH * kTileK * 2;
constexpr int kStageBytes = kXBytes + kOperands * kOperandBytes;
constexpr int kStages = STAGES;

static_assert(kStages >= 2, "a stage is given back while the next one is multiplied");

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Which team a consumer is of, and which part of the rows is its own.
INLINE int team_of(int consumer) { return kPingPong ? consumer / kConsumersPerTile : 0; }
INLINE int part_of(int consumer) { return kPingPong ? consumer % kConsumersPerTile : consumer; }

// Accumulators of a consumer's part of a tile, 64 rows each, of the columns of every operand.
template <int WIDTH>
using Sums = float[kBlocks][kOperands * WIDTH / 2];
