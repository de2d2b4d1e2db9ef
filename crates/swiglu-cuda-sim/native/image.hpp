// A simulated CUBIN: a shared library with a trailer, which tells its length and whether it is
// whole.
#pragma once

#include <elf.h>

#include <cstdint>
#include <cstring>

namespace sim {

struct ImageTrailer {
  static constexpr char MARK[9] = "SIMCUBIN";
  char mark[8];
  uint64_t bytes;  // of the library, without the trailer
  uint64_t hash;
};

// FNV-1a over 8-byte words, the last padded with zeros.
inline uint64_t image_hash(const unsigned char* p, uint64_t bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint64_t i = 0; i < bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, p + i, bytes - i < 8 ? bytes - i : 8);
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return hash;
}

// Linkers put the table of section headers last. 0 for what is no library.
inline uint64_t library_bytes(const unsigned char* p) {
  Elf64_Ehdr header;
  std::memcpy(&header, p, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return 0;
  const uint64_t end = header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize;
  return end < (uint64_t{1} << 30) ? end : 0;
}

}  // namespace sim
