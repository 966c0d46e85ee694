#include "directory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "wire.h"

enum { VERSION = 6, RECORD_BYTES = 80, PAGE_BYTES = 4096, MAX_KEY_BYTES = 48 };
enum { CHECKED_BYTES = 128, FLOOR_AT = 136 };
enum { WRITING = 1, READY = 2 };

static uint32_t crc32(const void *bytes, size_t size) {
  uint32_t crc = 0xFFFFFFFF;
  for (const uint8_t *at = bytes; size--; at++) {
    crc ^= *at;
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

static uint32_t u32(const uint8_t *at) { return (uint32_t)little_endian(at, 4); }

static uint64_t u64(const uint8_t *at) { return little_endian(at, 8); }

void directory_map(struct directory *directory, int fd) {
  static const uint8_t magic[8] = {'k', 'v', 'd', '-', 'd', 'i', 'r', 0};
  struct stat status;
  if (crc32("123456789", 9) != 0xCBF43926) die("this CRC-32 is another one");
  if (fstat(fd, &status) != 0 || status.st_size < PAGE_BYTES) die("no directory");
  uint64_t size = (uint64_t)status.st_size;
  const uint8_t *bytes = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
  if (bytes == MAP_FAILED) die("the directory cannot be mapped: %s", strerror(errno));
  if (memcmp(bytes, magic, sizeof magic) != 0 || u32(bytes + 8) != VERSION ||
      u32(bytes + 12) != RECORD_BYTES || u32(bytes + CHECKED_BYTES) != crc32(bytes, CHECKED_BYTES))
    die("no directory of version %d", VERSION);
  *directory = (struct directory){bytes, size, .slots = u32(bytes + 16)};
  directory->capacity = u32(bytes + 20);
  directory->probe_limit = u32(bytes + 24);
  directory->blocks_per_chunk = u32(bytes + 28);
  directory->records = u64(bytes + 32);
  directory->index = u64(bytes + 40);
  if (u64(bytes + 48) > size || !directory->capacity ||
      directory->records + (uint64_t)directory->slots * RECORD_BYTES > size ||
      directory->index + (uint64_t)directory->capacity * 8 > size)
    die("the directory is larger than its file");
}

void directory_unmap(struct directory *directory) {
  munmap((void *)directory->bytes, directory->size);
}

static const uint8_t *record_of(const struct directory *directory, uint64_t slot) {
  return directory->bytes + directory->records + slot * RECORD_BYTES;
}

enum lookup directory_find(const struct directory *directory, const char *key, uint64_t *slot,
                           uint64_t *generation) {
  size_t length = strlen(key);
  if (!length || length > MAX_KEY_BYTES) return MISS;
  uint32_t hash = crc32(key, length), at = hash % directory->capacity;
  for (uint32_t left = directory->probe_limit; left; left--) {
    uint64_t entry = little_endian(directory->bytes + directory->index + (uint64_t)at * 8, 8);
    if (!entry) return MISS;
    uint32_t found = (uint32_t)entry - 1;
    if (entry >> 32 == hash && found < directory->slots) {
      const uint8_t *record = record_of(directory, found);
      if (record[21] == length && memcmp(record + 32, key, length) == 0 &&
          u64(record) > u64(directory->bytes + FLOOR_AT)) {
        uint64_t held = little_endian(record + 24, 2), first = little_endian(record + 22, 2);
        if (slot) *slot = found;
        if (generation) *generation = u64(record);
        if (record[20] == READY) return !first && held >= directory->blocks_per_chunk ? HIT : MISS;
        if (record[20] == WRITING) return HIT_PENDING;
      }
    }
    at = (at + 1) % directory->capacity;
  }
  return MISS;
}

bool directory_lent(const struct directory *directory, uint64_t slot, uint64_t generation) {
  if (slot >= directory->slots) return false;
  const uint8_t *record = record_of(directory, slot);
  return little_endian(record + 28, 4) == (uint32_t)generation;
}
