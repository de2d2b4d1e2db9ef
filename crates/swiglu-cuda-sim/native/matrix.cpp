// Matrix operations of one warp: ldmatrix, stmatrix and mma.sync.
#include <cstring>

#include "floats.hpp"
#include "gang.hpp"

namespace sim {
namespace {

struct MoveArgs {
  unsigned count, address;
  unsigned* registers;
};

// PTX ISA 9.7.14.5.15 and .16 (ldmatrix, stmatrix): lane 8i + r addresses row r, 16 bytes, of
// matrix i. Lane l holds elements 2(l % 4) and the next of row l / 4; transposed, of column l / 4.
template <MatrixMove KIND>
void move(Warp& warp, Meeting& m) {
  const unsigned count = static_cast<const MoveArgs*>(m.arguments[0])->count;
  const char* operation = KIND == MatrixMove::Store ? "stmatrix" : "ldmatrix";
  for (unsigned matrix = 0; matrix < count; ++matrix) {
    uint16_t rows[8][8];
    std::byte* at[8];
    for (unsigned r = 0; r < 8; ++r) {
      const unsigned lane = 8 * matrix + r;
      const auto& a = *static_cast<const MoveArgs*>(m.arguments[lane]);
      at[r] = shared_at(*warp.block, a.address, 16, 16, operation);
      std::memcpy(rows[r], at[r], 16);
    }
    for (unsigned lane = 0; lane < WARP; ++lane) {
      unsigned& x = static_cast<const MoveArgs*>(m.arguments[lane])->registers[matrix];
      const unsigned i = lane / 4, j = 2 * (lane % 4);
      if (KIND == MatrixMove::Load) x = rows[i][j] | static_cast<unsigned>(rows[i][j + 1]) << 16;
      if (KIND == MatrixMove::LoadTransposed) {
        x = rows[j][i] | static_cast<unsigned>(rows[j + 1][i]) << 16;
      }
      if (KIND == MatrixMove::Store) std::memcpy(&rows[i][j], &x, 4);
    }
    if (KIND != MatrixMove::Store) continue;
    for (unsigned r = 0; r < 8; ++r) {
      const unsigned lane = 8 * matrix + r;
      std::memcpy(at[r], rows[r], 16);
      mark_unfenced(*warp.lanes[lane], static_cast<const MoveArgs*>(m.arguments[lane])->address,
                    16);
    }
  }
}

struct MmaArgs {
  float* d;
  const unsigned *a, *b;
};

// D[16][8] += A[16][K]·B[K][8]
template <int K>
void accumulate(Meeting& m, const float (&a)[16][K], const float (&b)[K][8]) {
  float d[16][8];
  for (unsigned lane = 0; lane < WARP; ++lane) {
    const float* own = static_cast<const MmaArgs*>(m.arguments[lane])->d;
    for (unsigned i = 0; i < 4; ++i) d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] = own[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (unsigned lane = 0; lane < WARP; ++lane) {
    float* own = static_cast<const MmaArgs*>(m.arguments[lane])->d;
    for (unsigned i = 0; i < 4; ++i) own[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
}

// PTX ISA 9.7.14.5.8 (fragments of mma.m16n8k16 for 16-bit types).
template <Element ELEMENT>
void mma_16(Warp&, Meeting& m) {
  float a[16][16], b[16][8];
  for (unsigned lane = 0; lane < WARP; ++lane) {
    const auto& args = *static_cast<const MmaArgs*>(m.arguments[lane]);
    const unsigned group = lane / 4, k = 2 * (lane % 4);
    for (unsigned i = 0; i < 8; ++i) {  // a register i / 2, half i % 2
      const unsigned bits = args.a[i / 2] >> (16 * (i % 2));
      a[group + 8 * (i / 2 % 2)][k + 8 * (i / 4) + i % 2] =
          from_16(ELEMENT, static_cast<uint16_t>(bits));
    }
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned bits = args.b[i / 2] >> (16 * (i % 2));
      b[k + 8 * (i / 2) + i % 2][group] = from_16(ELEMENT, static_cast<uint16_t>(bits));
    }
  }
  accumulate<16>(m, a, b);
}

// PTX ISA 9.7.14.5.6 (fragments of mma.m16n8k8 for tf32).
void mma_tf32(Warp&, Meeting& m) {
  float a[16][8], b[8][8];
  for (unsigned lane = 0; lane < WARP; ++lane) {
    const auto& args = *static_cast<const MmaArgs*>(m.arguments[lane]);
    const unsigned group = lane / 4, k = lane % 4;
    for (unsigned i = 0; i < 4; ++i) a[group + 8 * (i % 2)][k + 4 * (i / 2)] = from_tf32(args.a[i]);
    for (unsigned i = 0; i < 2; ++i) b[k + 4 * i][group] = from_tf32(args.b[i]);
  }
  accumulate<8>(m, a, b);
}

void require_full_warp(const char* operation) {
  if (self().warp->members != 0xffffffffu)
    fault("%s in a warp of fewer than 32 threads", operation);
}

}  // namespace
}  // namespace sim

using namespace sim;

extern "C" {

void sim_matrix_move(MatrixMove kind, unsigned count, unsigned address, unsigned* registers) {
  MoveArgs args{count, address, registers};
  const char* operation = kind == MatrixMove::Store ? "stmatrix" : "ldmatrix";
  require_full_warp(operation);
  const uint64_t signature = static_cast<uint64_t>(kind) << 8 | count;
  switch (kind) {
    case MatrixMove::Load:
      meet(operation, signature, ~0u, &args, move<MatrixMove::Load>);
      break;
    case MatrixMove::LoadTransposed:
      meet(operation, signature, ~0u, &args, move<MatrixMove::LoadTransposed>);
      break;
    case MatrixMove::Store:
      meet(operation, signature, ~0u, &args, move<MatrixMove::Store>);
      break;
  }
}

void sim_mma(Element element, float* d, const unsigned* a, const unsigned* b) {
  MmaArgs args{d, a, b};
  require_full_warp("mma.sync");
  const auto signature = static_cast<uint64_t>(element);
  switch (element) {
    case Element::F16:
      meet("mma.sync", signature, ~0u, &args, mma_16<Element::F16>);
      break;
    case Element::BF16:
      meet("mma.sync", signature, ~0u, &args, mma_16<Element::BF16>);
      break;
    case Element::TF32:
      meet("mma.sync", signature, ~0u, &args, mma_tf32);
      break;
  }
}

}  // extern "C"
