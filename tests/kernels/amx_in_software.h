// AMX for CPUs without it: included before the kernel's source, it makes the kernel take its AMX path.
// Tiles have the full 16 x 64 bytes, as the kernel configures them; bfloat16 products are summed in float32.

#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace software_amx {

struct Tile {
    uint8_t rows[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline void config(const void *from) { configured = static_cast<const uint8_t *>(from)[0] == 1; }
inline void store_config(void *to) { std::memset(to, 0, 64); }
inline Tile &tile(int index) {
    if (!configured) __builtin_trap();
    return tiles[index];
}
inline void zero(int index) { std::memset(&tile(index), 0, sizeof(Tile)); }
inline void load(int index, const void *from, int64_t stride) {
    for (int i = 0; i < 16; i++) std::memcpy(tile(index).rows[i], static_cast<const uint8_t *>(from) + i * stride, 64);
}
inline void store(int index, void *to, int64_t stride) {
    for (int i = 0; i < 16; i++) std::memcpy(static_cast<uint8_t *>(to) + i * stride, tile(index).rows[i], 64);
}
inline float at(const Tile &tile, int row, int element) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<uint8_t *>(&bits) + 2, tile.rows[row] + 2 * element, 2);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void multiply_add(int c, int a, int b) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float sum;
            std::memcpy(&sum, tile(c).rows[m] + 4 * n, 4);
            for (int k = 0; k < 32; k++) sum += at(tile(a), m, k) * at(tile(b), k / 2, 2 * n + k % 2);
            std::memcpy(tile(c).rows[m] + 4 * n, &sum, 4);
        }
}

}  // namespace software_amx

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig software_amx::config
#define _tile_storeconfig software_amx::store_config
#define _tile_zero software_amx::zero
#define _tile_loadd software_amx::load
#define _tile_stored software_amx::store
#define _tile_dpbf16ps software_amx::multiply_add
#define syscall(...) 0
