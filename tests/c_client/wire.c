#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FDS = 64, GREETING_BYTES = 64, MAX_MESSAGE_BYTES = 16 << 20 };
enum { MORE = 1, LONG = 2, COMMAND = 4 };  // flags of a ZMTP frame
static const uint8_t MAGIC[4] = {'k', 'v', 'd', 0};
// The greeting of ZMTP 3.1, mechanism NULL, and the command READY.
static const uint8_t OPENING[] = {
    0xff, [9] = 0x7f, 3, 1, 'N', 'U', 'L', 'L',
    [GREETING_BYTES] = COMMAND, 28, 5, 'R', 'E', 'A', 'D', 'Y',
    11, 'S', 'o', 'c', 'k', 'e', 't', '-', 'T', 'y', 'p', 'e',
    0, 0, 0, 6, 'D', 'E', 'A', 'L', 'E', 'R',
};

void die(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  exit(1);
}

int64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// ------------------------------------------------------------------ little-endian

static void put_le(uint8_t *at, uint64_t value, size_t width) {
  for (size_t i = 0; i < width; i++) at[i] = (uint8_t)(value >> 8 * i);
}

uint64_t little_endian(const uint8_t *at, size_t width) {
  uint64_t value = 0;
  for (size_t i = 0; i < width; i++) value |= (uint64_t)at[i] << 8 * i;
  return value;
}

// ------------------------------------------------------------------------- bodies

void body_begin(struct body *body, size_t fields) {
  msgpack_sbuffer_init(&body->buffer);
  msgpack_packer_init(&body->pack, &body->buffer, msgpack_sbuffer_write);
  msgpack_pack_map(&body->pack, fields);
}

void put_name(struct body *body, const char *name) {
  msgpack_pack_str(&body->pack, strlen(name));
  msgpack_pack_str_body(&body->pack, name, strlen(name));
}

void put_text(struct body *body, const char *name, const char *text) {
  put_name(body, name);
  put_name(body, text);
}

void put_number(struct body *body, const char *name, uint64_t value) {
  put_name(body, name);
  msgpack_pack_uint64(&body->pack, value);
}

void put_keys(struct body *body, const char *name, const char *const *keys, size_t count) {
  put_name(body, name);
  msgpack_pack_array(&body->pack, count);
  for (size_t i = 0; i < count; i++) {
    msgpack_pack_bin(&body->pack, strlen(keys[i]));
    msgpack_pack_bin_body(&body->pack, keys[i], strlen(keys[i]));
  }
}

void put_integers(struct body *body, const char *name, const uint64_t *values, size_t count,
                  size_t width) {
  uint8_t item[8];
  put_name(body, name);
  msgpack_pack_array(&body->pack, 2);
  put_name(body, width == 4 ? "u4" : "u8");
  msgpack_pack_bin(&body->pack, count * width);
  for (size_t i = 0; i < count; i++) {
    put_le(item, values[i], width);
    msgpack_pack_bin_body(&body->pack, item, width);
  }
}

// ----------------------------------------------------------------------- messages

// Takes the frame over.
static struct message decode(char *frame, size_t size, int fd) {
  struct message message = {.fd = fd, .frame = frame};
  const uint8_t *head = (const uint8_t *)frame;
  if (size < HEADER_BYTES || memcmp(head, MAGIC, sizeof MAGIC) != 0) die("no frame of kvd");
  if (little_endian(head + 4, 2) != PROTOCOL_VERSION) die("another version of the protocol");
  message.tag = (enum tag)little_endian(head + 6, 2);
  message.request_id = little_endian(head + 8, 8);
  size_t at = HEADER_BYTES;
  msgpack_unpacked_init(&message.body);
  if (msgpack_unpack_next(&message.body, frame, size, &at) != MSGPACK_UNPACK_SUCCESS ||
      at != size || message.body.data.type != MSGPACK_OBJECT_MAP)
    die("the body of message 0x%02x is no map", message.tag);
  return message;
}

void message_free(struct message *message) {
  msgpack_unpacked_destroy(&message->body);
  free(message->frame);
}

static bool is_string(const msgpack_object *object, const char *expected) {
  return object->type == MSGPACK_OBJECT_STR && object->via.str.size == strlen(expected) &&
         memcmp(object->via.str.ptr, expected, object->via.str.size) == 0;
}

static const msgpack_object *field(const struct message *message, const char *name) {
  const msgpack_object_map *map = &message->body.data.via.map;
  for (uint32_t i = 0; i < map->size; i++)
    if (is_string(&map->ptr[i].key, name)) return &map->ptr[i].val;
  die("message 0x%02x has no field %s", message->tag, name);
}

uint64_t number(const struct message *message, const char *name) {
  const msgpack_object *object = field(message, name);
  if (object->type == MSGPACK_OBJECT_BOOLEAN) return object->via.boolean;
  if (object->type != MSGPACK_OBJECT_POSITIVE_INTEGER) die("%s is no number", name);
  return object->via.u64;
}

void copy_text(const struct message *message, const char *name, char *into, size_t size) {
  const msgpack_object *object = field(message, name);
  if (object->type != MSGPACK_OBJECT_STR || object->via.str.size >= size)
    die("%s is no text below %zu bytes", name, size);
  memcpy(into, object->via.str.ptr, object->via.str.size);
  into[object->via.str.size] = 0;
}

size_t integers(const struct message *message, const char *name, uint64_t *into, size_t most) {
  const msgpack_object *object = field(message, name);
  if (object->type != MSGPACK_OBJECT_ARRAY || object->via.array.size != 2)
    die("%s is no integer array", name);
  const msgpack_object *dtype = &object->via.array.ptr[0], *items = &object->via.array.ptr[1];
  if (dtype->type != MSGPACK_OBJECT_STR || dtype->via.str.size != 2 ||
      items->type != MSGPACK_OBJECT_BIN)
    die("%s is no integer array", name);
  size_t width = (size_t)(dtype->via.str.ptr[1] - '0'), size = items->via.bin.size;
  if ((width != 1 && width != 2 && width != 4 && width != 8) || size % width ||
      size > most * width)
    die("%s has %zu bytes, %zu items of %zu are the most", name, size, most, width);
  for (size_t i = 0; i < size / width; i++)
    into[i] = little_endian((const uint8_t *)items->via.bin.ptr + i * width, width);
  return size / width;
}

static void copy_token(const struct message *message, uint8_t *into) {
  const msgpack_object *object = field(message, "token");
  if (object->type != MSGPACK_OBJECT_BIN || object->via.bin.size != TOKEN_BYTES) die("no token");
  memcpy(into, object->via.bin.ptr, TOKEN_BYTES);
}

// --------------------------------------------------------------------- the stream

// Messages are read to their ends and no further, so descriptors belong to the one that is read.
// Of several the first is kept: no event loop here wants to be woken, nothing is described.
static void receive_bytes(const struct connection *connection, void *into, size_t size, int *fd) {
  union {
    struct cmsghdr header;
    char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
  } control;
  int fds[MAX_FDS];
  for (size_t have = 0; have < size;) {
    struct iovec part = {(char *)into + have, size - have};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                            .msg_controllen = sizeof control};
    ssize_t received = recvmsg(connection->socket, &header, MSG_CMSG_CLOEXEC);
    if (received < 0) die("nothing came for %d ms: %s", PATIENCE_MS, strerror(errno));
    if (!received) die("the daemon has closed the connection");
    if (header.msg_flags & MSG_CTRUNC) die("descriptors were lost");
    have += (size_t)received;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    if (!rights || rights->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(fds, CMSG_DATA(rights), count * sizeof(int));
    *fd = fds[0];
    for (size_t i = 1; i < count; i++) close(fds[i]);
  }
}

static struct message receive(const struct connection *connection) {
  uint8_t head[9];
  int fd = -1;
  for (;;) {
    receive_bytes(connection, head, 2, &fd);
    uint64_t size = head[1];
    if (head[0] & LONG) {
      receive_bytes(connection, head + 2, 7, &fd);
      size = 0;
      for (int i = 1; i < 9; i++) size = size << 8 | head[i];
    }
    if (head[0] & MORE || size > MAX_MESSAGE_BYTES) die("a frame with flags %d", head[0]);
    char *frame = malloc(size + 1);
    if (!frame) die("no memory for a message of %zu bytes", (size_t)size);
    receive_bytes(connection, frame, size, &fd);
    if (!(head[0] & COMMAND)) return decode(frame, size, fd);
    free(frame);  // READY
  }
}

static void take_notice(struct connection *connection, struct message *notice) {
  char text[4097];
  if (notice->tag == ATTACHED) {
    if (connection->directory >= 0) close(connection->directory);
    connection->directory = notice->fd;
  } else if (notice->tag == LANE_UP) {
    if (connection->lifeline >= 0) close(connection->lifeline);
    connection->lifeline = notice->fd;
    copy_text(notice, "endpoint", connection->endpoint, sizeof connection->endpoint);
    copy_token(notice, connection->token);
  } else if (notice->tag == DETACHED) {
    close(connection->directory);
    connection->directory = -1;
  } else {
    copy_text(notice, "text", text, sizeof text);
    die("notice 0x%02x: %s", notice->tag, text);
  }
  message_free(notice);
}

void await_notice(struct connection *connection, const int *what, int before) {
  while (*what == before) {
    struct message notice = receive(connection);
    if (notice.request_id) die("a reply that nobody awaits");
    take_notice(connection, &notice);
  }
}

uint64_t ask_with_fds(struct connection *connection, enum tag tag, struct body *body,
                      const int *fds, size_t count) {
  uint8_t head[9 + HEADER_BYTES] = {LONG};
  union {
    struct cmsghdr header;
    char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
  } control = {0};
  size_t size = HEADER_BYTES + body->buffer.size;
  for (int i = 1; i < 9; i++) head[i] = (uint8_t)((uint64_t)size >> 8 * (8 - i));
  memcpy(head + 9, MAGIC, sizeof MAGIC);
  put_le(head + 13, PROTOCOL_VERSION, 2);
  put_le(head + 15, tag, 2);
  put_le(head + 17, ++connection->last_id, 8);
  struct iovec parts[2] = {{head, sizeof head}, {body->buffer.data, body->buffer.size}};
  struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2};
  if (count > MAX_FDS) die("%zu descriptors with one message", count);
  if (count) {
    header.msg_control = &control;
    header.msg_controllen = CMSG_SPACE(count * sizeof(int));
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(rights), fds, count * sizeof(int));
  }
  if (sendmsg(connection->socket, &header, MSG_NOSIGNAL) != (ssize_t)(9 + size))
    die("sendmsg: %s", strerror(errno));
  msgpack_sbuffer_destroy(&body->buffer);
  return connection->last_id;
}

uint64_t ask(struct connection *connection, enum tag tag, struct body *body) {
  return ask_with_fds(connection, tag, body, NULL, 0);
}

struct message answer(struct connection *connection, uint64_t id, enum tag tag) {
  char text[4097] = "";
  struct message reply = receive(connection);
  while (!reply.request_id) {
    take_notice(connection, &reply);
    reply = receive(connection);
  }
  if (reply.request_id != id) die("an answer to another request");
  if (reply.tag == tag) return reply;
  if (reply.tag == ERROR) copy_text(&reply, "text", text, sizeof text);
  die("0x%02x in place of 0x%02x: %s", reply.tag, tag, text);
}

struct message exchange(struct connection *connection, enum tag tag, struct body *body,
                        enum tag reply) {
  return answer(connection, ask(connection, tag, body), reply);
}

// -------------------------------------------------------------------- connections

static void connect_to(struct connection *connection, const char *path) {
  uint8_t greeting[GREETING_BYTES];
  int none = -1;
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  struct timeval patience = {.tv_sec = PATIENCE_MS / 1000};
  *connection = (struct connection){.directory = -1, .lifeline = -1};
  int length = snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
  if ((size_t)length >= sizeof address.sun_path) die("the path is too long");
  connection->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection->socket < 0) die("socket: %s", strerror(errno));
  setsockopt(connection->socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  setsockopt(connection->socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (connect(connection->socket, (struct sockaddr *)&address, sizeof address) != 0)
    die("connect to %s: %s", path, strerror(errno));
  if (send(connection->socket, OPENING, sizeof OPENING, MSG_NOSIGNAL) != sizeof OPENING)
    die("send: %s", strerror(errno));
  receive_bytes(connection, greeting, sizeof greeting, &none);
  if (greeting[0] != 0xff || !(greeting[9] & 1) || greeting[10] < 3) die("no greeting of ZMTP 3");
}

void session_open(struct connection *session, const char *runtime_dir, const char *kind,
                  const char *engine) {
  char path[256];
  snprintf(path, sizeof path, "%s/broker.sock", runtime_dir);
  connect_to(session, path);
  struct body hello;
  body_begin(&hello, 6);
  put_text(&hello, "kind", kind);
  put_text(&hello, "engine", engine);
  put_number(&hello, "pid", (uint64_t)getpid());
  put_number(&hello, "protocol_min", PROTOCOL_VERSION);
  put_number(&hello, "protocol_max", PROTOCOL_VERSION);
  put_text(&hello, "client", "c_client 1");
  struct message welcome = exchange(session, HELLO, &hello, WELCOME);
  if (number(&welcome, "protocol") != PROTOCOL_VERSION) die("another version of the protocol");
  message_free(&welcome);
}

void lane_open(struct connection *lane, const struct connection *worker) {
  struct body join;
  if (strncmp(worker->endpoint, "ipc://", 6) != 0) die("no path: %s", worker->endpoint);
  connect_to(lane, worker->endpoint + 6);
  body_begin(&join, 1);
  put_name(&join, "token");
  msgpack_pack_bin(&join.pack, TOKEN_BYTES);
  msgpack_pack_bin_body(&join.pack, worker->token, TOKEN_BYTES);
  struct message joined = exchange(lane, JOIN, &join, OK);
  message_free(&joined);
}

void connection_close(struct connection *connection) {
  close(connection->socket);
  if (connection->directory >= 0) close(connection->directory);
  if (connection->lifeline >= 0) close(connection->lifeline);
}
