// A whole engine of one scheduler and one worker, written from docs/protocol.md alone.
//
//   c_client RUNTIME_DIR         stores chunks, finds them, loads them elsewhere, compares
//   c_client --lookup FILE KEY…  looks keys up in a directory that a file holds
//
// Prints a line for every step that it has verified; ends with status 1 at the first that fails.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "scheduler.h"
#include "wire.h"

enum { LAYERS = 2, BLOCKS = 64, PAGE = 4096, FACTOR = 2, POISON = 0xEE };
enum { STORAGE = BLOCKS * PAGE, MEMORY = LAYERS * STORAGE, LISTED = CHUNKS * FACTOR };
enum { CONTROL_BYTES = 65536, TIMELINE = 0, EPOCH = 1 };  // words of the control page
static const char *const KEYS[CHUNKS] = {"c-client chunk 0", "c-client chunk 1"};
static const char *const OTHER_KEYS[CHUNKS] = {"c-client chunk 2", "c-client chunk 3"};
static const char *const LATE_KEYS[CHUNKS] = {"c-client chunk 4", "c-client chunk 5"};
static const uint64_t STORED[LISTED] = {1, 2, 3, 4}, LOADED[LISTED] = {40, 39, 12, 50};

struct engine {
  struct scheduler scheduler;
  struct connection worker, lane;
  uint8_t *memory;
  volatile uint64_t *control;
};

static void done(const char *step) {
  printf("ok: %s\n", step);
  fflush(stdout);
}

static void expect(bool is_so, const char *what) {
  if (!is_so) die("not so: %s", what);
}

// ------------------------------------------------------------------------ memory

// Memory that can be shared: its size is sealed, so that the daemon may rely on it.
static void *shared_memory(size_t size, int *fd) {
  *fd = memfd_create("c_client", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (*fd < 0 || ftruncate(*fd, (off_t)size) != 0) die("memory: %s", strerror(errno));
  if (fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) die("a seal: %s", strerror(errno));
  void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
  if (memory == MAP_FAILED) die("mmap: %s", strerror(errno));
  return memory;
}

static uint8_t *page_of(struct engine *engine, int layer, uint64_t block) {
  return engine->memory + layer * STORAGE + block * PAGE;
}

static uint8_t content(int layer, int position, int at) {
  return (uint8_t)(layer * 101 + position * 37 + at * 7 + at / 256);
}

static void compute(struct engine *engine, const uint64_t *blocks) {
  for (int layer = 0; layer < LAYERS; layer++)
    for (int position = 0; position < LISTED; position++)
      for (int at = 0; at < PAGE; at++)
        page_of(engine, layer, blocks[position])[at] = content(layer, position, at);
}

// The loaded blocks hold what was computed, and every other block is still poisoned.
static void compare(struct engine *engine, const uint64_t *blocks) {
  for (int layer = 0; layer < LAYERS; layer++)
    for (uint64_t block = 0; block < BLOCKS; block++) {
      int position = 0;
      while (position < LISTED && blocks[position] != block) position++;
      for (int at = 0; at < PAGE; at++) {
        uint8_t due = position < LISTED ? content(layer, position, at) : POISON;
        if (page_of(engine, layer, block)[at] != due)
          die("layer %d, block %d, byte %d is wrong", layer, (int)block, at);
      }
    }
}

// ------------------------------------------------------------------ registration

static void put_layout(struct body *body) {
  put_name(body, "layout");
  msgpack_pack_map(&body->pack, 6);
  put_number(body, "num_blocks", BLOCKS);
  put_number(body, "blocks_per_chunk", FACTOR);
  put_number(body, "hash_block_size", 16);
  put_name(body, "storages");
  msgpack_pack_array(&body->pack, LAYERS);
  for (int layer = 0; layer < LAYERS; layer++) msgpack_pack_uint64(&body->pack, STORAGE);
  put_name(body, "tensors");
  msgpack_pack_array(&body->pack, LAYERS);
  for (int layer = 0; layer < LAYERS; layer++) {
    msgpack_pack_map(&body->pack, 4);
    put_number(body, "storage", (uint64_t)layer);
    put_number(body, "offset", 0);
    put_number(body, "page_bytes", PAGE);
    put_number(body, "block_stride", PAGE);
  }
  put_name(body, "groups");
  msgpack_pack_array(&body->pack, 1);
  msgpack_pack_map(&body->pack, 2);
  put_name(body, "refs");
  msgpack_pack_array(&body->pack, LAYERS);
  for (int layer = 0; layer < LAYERS; layer++) {
    msgpack_pack_map(&body->pack, 2);
    put_number(body, "tensor", (uint64_t)layer);
    put_number(body, "page_bytes", PAGE);
  }
  put_number(body, "block_size", 16);
}

static void do_register(struct engine *engine) {
  int fds[2];
  char label[32];
  struct body body;
  engine->control = shared_memory(CONTROL_BYTES, &fds[0]);
  engine->memory = shared_memory(MEMORY, &fds[1]);
  body_begin(&body, 6);
  put_number(&body, "rank", 0);
  put_number(&body, "world_size", 1);
  put_text(&body, "device", "host");
  put_name(&body, "fingerprint");
  msgpack_pack_map(&body.pack, 2);
  put_text(&body, "model", "c-client");
  snprintf(label, sizeof label, "process %d", (int)getpid());
  put_text(&body, "label", label);  // chunks of its own: the first lookup has to miss
  put_layout(&body);
  put_name(&body, "handles");  // both storages lie in one file
  msgpack_pack_array(&body.pack, LAYERS);
  for (uint64_t layer = 0; layer < LAYERS; layer++) {
    msgpack_pack_map(&body.pack, 3);
    put_text(&body, "type", "host");
    put_number(&body, "fd_index", 1);
    put_number(&body, "offset", layer * STORAGE);
  }
  uint64_t id = ask_with_fds(&engine->worker, REGISTER, &body, fds, 2);
  struct message reply = answer(&engine->worker, id, REGISTERED);  // LaneUp comes before it
  close(fds[0]);
  close(fds[1]);
  message_free(&reply);
  lane_open(&engine->lane, &engine->worker);
}

// --------------------------------------------------------------------- requests

static uint64_t send_job(struct engine *engine, enum tag tag, uint64_t job, const uint64_t *blocks,
                         const struct slots *chunks, uint64_t after) {
  const uint64_t size = LISTED, index = 0;
  struct body body;
  body_begin(&body, tag == STORE ? 6 : 4);
  put_number(&body, "job", job);
  put_name(&body, "blocks");
  msgpack_pack_map(&body.pack, 5);
  put_integers(&body, "block_ids", blocks, LISTED, 4);
  put_integers(&body, "group_sizes", &size, 1, 4);
  put_integers(&body, "block_indices", &index, 1, 4);
  put_slots(&body, chunks);
  put_number(&body, "after", after);
  if (tag == STORE) {
    put_number(&body, "word", EPOCH);
    put_number(&body, "epoch", engine->control[EPOCH]);
  }
  put_number(&body, "deadline_ms", PATIENCE_MS);
  return ask(&engine->lane, tag, &body);
}

static void await_done(struct engine *engine, uint64_t id, uint64_t job, const char *status) {
  char found[32], text[4097];
  struct message reply = answer(&engine->lane, id, DONE);
  copy_text(&reply, "status", found, sizeof found);
  copy_text(&reply, "text", text, sizeof text);
  if (strcmp(found, status) != 0) die("a job ended as %s, not as %s: %s", found, status, text);
  expect(number(&reply, "job") == job, "Done names the job");
  if (!strcmp(status, "ok"))
    expect(number(&reply, "bytes") == LAYERS * LISTED * PAGE, "all bytes were moved");
  message_free(&reply);
}

// The lane has the job before the broker has read the step, and waits for that.
static void store_before_telling(struct engine *engine) {
  struct slots given = take_loans(&engine->scheduler, CHUNKS);
  uint64_t id = send_job(engine, STORE, 4, STORED, &given, 0);
  await_lookup(&engine->scheduler, LATE_KEYS, MISS);
  say(&engine->scheduler, (struct said){.keys = LATE_KEYS, .given = &given});
  await_done(engine, id, 4, "ok");
  await_lookup(&engine->scheduler, LATE_KEYS, HIT);
}

// The worker takes the blocks back before the store has begun: no chunk comes of it. Nor of keys
// that the scheduler gives up itself.
static void give_up_stores(struct engine *engine) {
  struct slots given = take_loans(&engine->scheduler, CHUNKS);
  say(&engine->scheduler, (struct said){.keys = OTHER_KEYS, .given = &given});
  uint64_t id = send_job(engine, STORE, 5, STORED, &given, 2);
  engine->control[EPOCH]++;
  engine->control[TIMELINE] = 2;
  await_done(engine, id, 5, "void");
  await_lookup(&engine->scheduler, OTHER_KEYS, MISS);
  given = take_loans(&engine->scheduler, CHUNKS);
  say(&engine->scheduler, (struct said){.keys = OTHER_KEYS, .given = &given});
  await_lookup(&engine->scheduler, OTHER_KEYS, HIT_PENDING);
  say(&engine->scheduler, (struct said){.dropped = OTHER_KEYS});
  await_lookup(&engine->scheduler, OTHER_KEYS, MISS);
}

static void ping(struct engine *engine) {
  struct body body;
  body_begin(&body, 1);
  put_name(&body, "lookups");
  msgpack_pack_map(&body.pack, 2);
  put_number(&body, "chunks", 2 * CHUNKS);
  put_number(&body, "hit_chunks", CHUNKS);
  struct message reply = exchange(&engine->scheduler.session, PING, &body, PONG);
  message_free(&reply);
  body_begin(&body, 0);
  reply = exchange(&engine->lane, PING, &body, PONG);
  message_free(&reply);
}

static void expect_code(struct message *reply, const char *due) {
  char code[32];
  copy_text(reply, "code", code, sizeof code);
  if (strcmp(code, due) != 0) die("a wrong request is answered by %s, not %s", code, due);
  message_free(reply);
}

// A key of 49 bytes; a scheduler that has nothing to unregister; a lane that serves jobs only.
static void wrong_requests(struct engine *engine) {
  const char *const long_key[1] = {"a key of 49 bytes, which is one more than allowed"};
  struct body body;
  body_begin(&body, 1);
  put_keys(&body, "dropped", long_key, 1);
  struct message reply = exchange(&engine->scheduler.session, STEP, &body, ERROR);
  expect_code(&reply, "bad_message");
  body_begin(&body, 0);
  reply = exchange(&engine->scheduler.session, UNREGISTER, &body, ERROR);
  expect_code(&reply, "bad_state");
  body_begin(&body, 0);
  reply = exchange(&engine->lane, UNREGISTER, &body, ERROR);
  expect_code(&reply, "bad_state");
}

// What was there is a miss as soon as it is answered, and what was lent is lent no more.
static void reset(struct engine *engine) {
  struct body body;
  struct slots lent = take_loans(&engine->scheduler, 1);
  await_lookup(&engine->scheduler, KEYS, HIT);
  body_begin(&body, 0);
  struct message reply = exchange(&engine->scheduler.session, RESET, &body, RESET_DONE);
  expect(number(&reply, "dropped") == 2 * CHUNKS, "all chunks are dropped");
  message_free(&reply);
  for (int i = 0; i < CHUNKS; i++)
    expect(directory_find(&engine->scheduler.directory, KEYS[i], NULL, NULL) == MISS,
           "nothing is found after a reset");
  expect(!directory_lent(&engine->scheduler.directory, lent.slots[0], lent.generations[0]),
         "loans are taken back by a reset");
  take_loans(&engine->scheduler, 1);
}

static void unregister(struct engine *engine) {
  struct body body;
  body_begin(&body, 0);
  struct message reply = exchange(&engine->worker, UNREGISTER, &body, OK);
  message_free(&reply);
  await_notice(&engine->scheduler.session, &engine->scheduler.session.directory,
               engine->scheduler.session.directory);
  expect(engine->scheduler.session.directory < 0, "the scheduler is told that it is detached");
}

// --------------------------------------------------------------------- scenarios

static void serve(struct engine *engine, const char *runtime_dir) {
  struct slots chunks;
  uint64_t id;
  session_open(&engine->scheduler.session, runtime_dir, "scheduler", "c-engine");
  session_open(&engine->worker, runtime_dir, "worker", "c-engine");
  done("hello");
  do_register(engine);
  done("registered");
  await_notice(&engine->scheduler.session, &engine->scheduler.session.directory, -1);
  directory_map(&engine->scheduler.directory, engine->scheduler.session.directory);
  done("attached");

  await_lookup(&engine->scheduler, KEYS, MISS);
  done("miss");
  chunks = take_loans(&engine->scheduler, CHUNKS);
  done("lent");
  say(&engine->scheduler, (struct said){.keys = KEYS, .given = &chunks});
  await_lookup(&engine->scheduler, KEYS, HIT_PENDING);
  done("pending");
  memset(engine->memory, POISON, MEMORY);
  id = send_job(engine, STORE, 1, STORED, &chunks, 1);
  compute(engine, STORED);  // the lane waits for the timeline
  engine->control[TIMELINE] = 1;
  await_done(engine, id, 1, "ok");
  done("stored");
  await_lookup(&engine->scheduler, KEYS, HIT);
  done("hit");

  memset(engine->memory, POISON, MEMORY);
  chunks = find_chunks(&engine->scheduler, KEYS);
  say(&engine->scheduler, (struct said){.pinned = &chunks});
  await_done(engine, send_job(engine, LOAD, 2, LOADED, &chunks, 0), 2, "ok");
  compare(engine, LOADED);
  say(&engine->scheduler, (struct said){.unpinned = LEASE, .used = KEYS});
  done("loaded and equal");
  chunks.generations[0]++;
  await_done(engine, send_job(engine, LOAD, 3, LOADED, &chunks, 0), 3, "stale");
  done("another generation is stale");
  store_before_telling(engine);
  done("submitted before it was told");
  give_up_stores(engine);
  done("given up");
  reset(engine);
  done("reset");
  ping(engine);
  done("pong");
  wrong_requests(engine);
  done("refused");
  unregister(engine);
  done("unregistered");
  directory_unmap(&engine->scheduler.directory);
  connection_close(&engine->lane);
  connection_close(&engine->worker);
  connection_close(&engine->scheduler.session);
}

static void look_up(const char *path, char **keys, int count) {
  static const char *const words[] = {"MISS", "HIT", "HIT_PENDING"};
  struct directory directory;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) die("%s: %s", path, strerror(errno));
  directory_map(&directory, fd);
  for (int i = 0; i < count; i++)
    printf("%s %s\n", keys[i], words[directory_find(&directory, keys[i], NULL, NULL)]);
  directory_unmap(&directory);
  close(fd);
}

int main(int count, char **arguments) {
  if (count >= 3 && !strcmp(arguments[1], "--lookup")) {
    look_up(arguments[2], arguments + 3, count - 3);
  } else if (count == 2) {
    struct engine engine = {.memory = NULL};
    serve(&engine, arguments[1]);
  } else {
    die("usage: c_client RUNTIME_DIR | --lookup FILE KEY...");
  }
  return 0;
}
