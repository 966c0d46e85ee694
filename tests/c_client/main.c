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
#include <zmq.h>

#include "directory.h"
#include "wire.h"

enum { LAYERS = 2, BLOCKS = 64, PAGE = 4096, FACTOR = 2, CHUNKS = 2, POISON = 0xEE };
enum { STORAGE = BLOCKS * PAGE, MEMORY = LAYERS * STORAGE, LISTED = CHUNKS * FACTOR };
enum { ACCEPTED = 1, PRESENT = 2, FOUND = 1 };
enum { CONTROL_BYTES = 65536, TIMELINE = 0, EPOCH = 1 };  // words of the control page
static const char *const KEYS[CHUNKS] = {"c-client chunk 0", "c-client chunk 1"};
static const char *const OTHER_KEYS[CHUNKS] = {"c-client chunk 2", "c-client chunk 3"};
static const uint64_t STORED[LISTED] = {1, 2, 3, 4}, LOADED[LISTED] = {40, 39, 12, 50};

struct engine {
  struct session scheduler, worker;
  struct lane lane;
  struct directory directory;
  uint8_t *memory;
  volatile uint64_t *control;
  const char *const *keys;  // of the chunks that it is about
};

struct chunks {
  uint64_t slots[CHUNKS], generations[CHUNKS];
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
  struct message reply = exchange_with_fds(&engine->worker, REGISTER, &body, fds, 2, REGISTERED);
  close(fds[0]);
  close(fds[1]);
  message_free(&reply);
  await_notice(&engine->worker, &engine->worker.lifeline, -1);
  lane_open(&engine->lane, &engine->worker);
}

// --------------------------------------------------------------------- requests

static struct message about_keys(struct engine *engine, enum tag tag, enum tag reply) {
  struct body body;
  body_begin(&body, tag == PREPARE_LOAD || tag == COMPLETE_STORE ? 2 : 1);
  put_keys(&body, engine->keys, CHUNKS);
  if (tag == PREPARE_LOAD) put_number(&body, "lease_ms", 2 * PATIENCE_MS);
  if (tag == COMPLETE_STORE) put_bool(&body, "success", true);
  return exchange(&engine->scheduler, tag, &body, reply);
}

// What is answered to every key has to be `due`; the slots and generations that come with it.
static struct chunks prepare(struct engine *engine, enum tag tag, uint64_t due, uint64_t *lease) {
  struct chunks chunks;
  uint64_t answers[CHUNKS];
  bool load = tag == PREPARE_LOAD;
  size_t given = due == PRESENT ? 0 : CHUNKS;
  struct message reply = about_keys(engine, tag, load ? LOAD_PREPARED : STORE_PREPARED);
  integers(&reply, load ? "found" : "answers", answers, CHUNKS);
  for (int i = 0; i < CHUNKS; i++)
    if (answers[i] != due) die("key %d is answered by %d", i, (int)answers[i]);
  integers(&reply, "slots", chunks.slots, given);
  integers(&reply, "generations", chunks.generations, given);
  if (load) *lease = number(&reply, "lease");
  message_free(&reply);
  return chunks;
}

static uint64_t send_job(struct engine *engine, enum tag tag, uint64_t job, const uint64_t *blocks,
                         const struct chunks *chunks, uint64_t after) {
  const uint64_t size = LISTED, index = 0;
  struct body body;
  body_begin(&body, tag == STORE ? 6 : 4);
  put_number(&body, "job", job);
  put_name(&body, "blocks");
  msgpack_pack_map(&body.pack, 5);
  put_integers(&body, "block_ids", blocks, LISTED, 4);
  put_integers(&body, "group_sizes", &size, 1, 4);
  put_integers(&body, "block_indices", &index, 1, 4);
  put_integers(&body, "slots", chunks->slots, CHUNKS, 4);
  put_integers(&body, "generations", chunks->generations, CHUNKS, 8);
  put_number(&body, "after", after);
  if (tag == STORE) {
    put_number(&body, "word", EPOCH);
    put_number(&body, "epoch", engine->control[EPOCH]);
  }
  put_number(&body, "deadline_ms", PATIENCE_MS);
  return ask_lane(&engine->lane, tag, &body);
}

static void await_done(struct engine *engine, uint64_t id, uint64_t job, const char *status) {
  char found[32], text[4097];
  struct message reply = answer(&engine->worker, engine->lane.jobs, id, DONE);
  copy_text(&reply, "status", found, sizeof found);
  copy_text(&reply, "text", text, sizeof text);
  if (strcmp(found, status) != 0) die("a job ended as %s, not as %s: %s", found, status, text);
  expect(number(&reply, "job") == job, "Done names the job");
  if (!strcmp(status, "ok"))
    expect(number(&reply, "bytes") == LAYERS * LISTED * PAGE, "all bytes were moved");
  message_free(&reply);
}

// Done comes before READY: the directory is asked until it says so.
static void await_lookup(struct engine *engine, enum lookup expected) {
  const struct timespec pause = {.tv_nsec = 1000000};
  int64_t end = now_ms() + PATIENCE_MS;
  for (int i = 0; i < CHUNKS; i++)
    while (directory_lookup(&engine->directory, engine->keys[i]) != expected) {
      if (now_ms() >= end) die("%s is not in the state that is due", engine->keys[i]);
      nanosleep(&pause, NULL);
    }
}

// The worker takes the blocks back before the store has begun: no chunk comes of it.
static void give_up_a_store(struct engine *engine) {
  engine->keys = OTHER_KEYS;
  struct chunks chunks = prepare(engine, PREPARE_STORE, ACCEPTED, NULL);
  uint64_t id = send_job(engine, STORE, 4, STORED, &chunks, 2);
  engine->control[EPOCH]++;
  engine->control[TIMELINE] = 2;
  await_done(engine, id, 4, "void");
  await_lookup(engine, MISS);
}

static void ping(struct engine *engine) {
  struct body body;
  body_begin(&body, 1);
  put_name(&body, "lookups");
  msgpack_pack_map(&body.pack, 2);
  put_number(&body, "chunks", 2 * CHUNKS);
  put_number(&body, "hit_chunks", CHUNKS);
  struct message reply = exchange(&engine->scheduler, PING, &body, PONG);
  message_free(&reply);
  body_begin(&body, 0);
  reply = exchange_lane(&engine->lane, PING, &body, PONG);
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
  put_keys(&body, long_key, 1);
  struct message reply = exchange(&engine->scheduler, PREPARE_STORE, &body, ERROR);
  expect_code(&reply, "bad_message");
  body_begin(&body, 0);
  reply = exchange(&engine->scheduler, UNREGISTER, &body, ERROR);
  expect_code(&reply, "bad_state");
  body_begin(&body, 0);
  reply = exchange_lane(&engine->lane, UNREGISTER, &body, ERROR);
  expect_code(&reply, "bad_state");
}

static void complete_load(struct engine *engine, uint64_t lease) {
  struct body body;
  body_begin(&body, 1);
  put_number(&body, "lease", lease);
  struct message reply = exchange(&engine->scheduler, COMPLETE_LOAD, &body, OK);
  message_free(&reply);
}

static void complete_store(struct engine *engine) {
  struct message reply = about_keys(engine, COMPLETE_STORE, STORE_COMPLETED);
  expect(number(&reply, "ready") == CHUNKS && !number(&reply, "dropped"), "both chunks are ready");
  message_free(&reply);
}

static void request_finished(struct engine *engine) {
  struct message reply = about_keys(engine, REQUEST_FINISHED, REQUEST_NOTED);
  expect(number(&reply, "found") == CHUNKS, "both chunks are here");
  message_free(&reply);
}

// What was there is a miss as soon as it is answered.
static void reset(struct engine *engine) {
  struct body body;
  engine->keys = KEYS;
  await_lookup(engine, HIT);
  body_begin(&body, 0);
  struct message reply = exchange(&engine->scheduler, RESET, &body, RESET_DONE);
  expect(number(&reply, "dropped") == CHUNKS, "both chunks are dropped");
  message_free(&reply);
  for (int i = 0; i < CHUNKS; i++)
    expect(directory_lookup(&engine->directory, KEYS[i]) == MISS, "nothing is found after a reset");
}

static void unregister(struct engine *engine) {
  struct body body;
  body_begin(&body, 0);
  struct message reply = exchange(&engine->worker, UNREGISTER, &body, OK);
  message_free(&reply);
  await_notice(&engine->scheduler, &engine->scheduler.directory, engine->scheduler.directory);
  expect(engine->scheduler.directory < 0, "the scheduler is told that it is detached");
}

// --------------------------------------------------------------------- scenarios

static void serve(struct engine *engine, const char *runtime_dir) {
  uint64_t id, lease;
  engine->keys = KEYS;
  session_open(&engine->scheduler, runtime_dir, "scheduler", "c-engine");
  session_open(&engine->worker, runtime_dir, "worker", "c-engine");
  done("hello");
  do_register(engine);
  done("registered");
  await_notice(&engine->scheduler, &engine->scheduler.directory, -1);
  directory_map(&engine->directory, engine->scheduler.directory);
  done("attached");

  await_lookup(engine, MISS);
  done("miss");
  struct chunks chunks = prepare(engine, PREPARE_STORE, ACCEPTED, NULL);
  await_lookup(engine, HIT_PENDING);
  done("pending");
  memset(engine->memory, POISON, MEMORY);
  id = send_job(engine, STORE, 1, STORED, &chunks, 1);
  compute(engine, STORED);  // the lane waits for the timeline
  engine->control[TIMELINE] = 1;
  await_done(engine, id, 1, "ok");
  done("stored");
  await_lookup(engine, HIT);
  complete_store(engine);
  prepare(engine, PREPARE_STORE, PRESENT, NULL);
  done("hit");

  memset(engine->memory, POISON, MEMORY);
  chunks = prepare(engine, PREPARE_LOAD, FOUND, &lease);
  id = send_job(engine, LOAD, 2, LOADED, &chunks, 0);
  await_done(engine, id, 2, "ok");
  compare(engine, LOADED);
  complete_load(engine, lease);
  request_finished(engine);
  done("loaded and equal");
  chunks.generations[0]++;
  await_done(engine, send_job(engine, LOAD, 3, LOADED, &chunks, 0), 3, "stale");
  done("another generation is stale");
  give_up_a_store(engine);
  done("given up");
  reset(engine);
  done("reset");
  ping(engine);
  done("pong");
  wrong_requests(engine);
  done("refused");
  unregister(engine);
  done("unregistered");
  directory_unmap(&engine->directory);
  zmq_close(engine->lane.jobs);
  session_close(&engine->worker);
  session_close(&engine->scheduler);
}

static void look_up(const char *path, char **keys, int count) {
  static const char *const words[] = {"MISS", "HIT", "HIT_PENDING"};
  struct directory directory;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) die("%s: %s", path, strerror(errno));
  directory_map(&directory, fd);
  for (int i = 0; i < count; i++)
    printf("%s %s\n", keys[i], words[directory_lookup(&directory, keys[i])]);
  directory_unmap(&directory);
  close(fd);
}

int main(int count, char **arguments) {
  if (count >= 3 && !strcmp(arguments[1], "--lookup")) {
    look_up(arguments[2], arguments + 3, count - 3);
  } else if (count == 2) {
    struct engine engine = {.memory = NULL};
    void *context = zmq_ctx_new();
    engine.scheduler.context = engine.worker.context = context;
    serve(&engine, arguments[1]);
    zmq_ctx_term(context);
  } else {
    die("usage: c_client RUNTIME_DIR | --lookup FILE KEY...");
  }
  return 0;
}
