#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

enum { NOTICE_BYTES = 64 * 1024, MAX_FDS = 64 };
static const uint8_t MAGIC[4] = {'k', 'v', 'd', 0};
static const uint8_t NO_ID[ID_BYTES];

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

// Takes a copy of the bytes.
static struct message decode(const void *bytes, size_t size, int fd) {
  struct message message = {.fd = fd, .frame = malloc(size + 1)};
  if (!message.frame) die("no memory for a message of %zu bytes", size);
  memcpy(message.frame, bytes, size);
  const uint8_t *head = (const uint8_t *)message.frame;
  if (size < HEADER_BYTES || memcmp(head, MAGIC, sizeof MAGIC) != 0) die("no frame of kvd");
  if (little_endian(head + 4, 2) != PROTOCOL_VERSION) die("another version of the protocol");
  message.tag = (enum tag)little_endian(head + 6, 2);
  message.request_id = little_endian(head + 8, 8);
  memcpy(message.boot_id, head + 16, ID_BYTES);
  memcpy(message.token, head + 32, ID_BYTES);
  size_t at = HEADER_BYTES;
  msgpack_unpacked_init(&message.body);
  if (msgpack_unpack_next(&message.body, message.frame, size, &at) != MSGPACK_UNPACK_SUCCESS ||
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

// ----------------------------------------------------------------- control socket

static void control_connect(struct session *session) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  struct timeval patience = {.tv_sec = PATIENCE_MS / 1000};
  int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/control.sock",
                        session->runtime_dir);
  if (length < 0 || (size_t)length >= sizeof address.sun_path) die("the path is too long");
  session->control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (session->control < 0) die("socket: %s", strerror(errno));
  setsockopt(session->control, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (connect(session->control, (struct sockaddr *)&address, sizeof address) != 0)
    die("connect to %s: %s", address.sun_path, strerror(errno));
}

static struct message next_notice(struct session *session) {
  static char frame[NOTICE_BYTES];
  union {
    struct cmsghdr header;
    char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
  } control;
  struct pollfd waiting = {.fd = session->control, .events = POLLIN};
  if (poll(&waiting, 1, PATIENCE_MS) != 1) die("no notice within %d ms", PATIENCE_MS);
  struct iovec part = {frame, sizeof frame};
  struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                          .msg_controllen = sizeof control};
  ssize_t size = recvmsg(session->control, &header, MSG_CMSG_CLOEXEC);
  if (size <= 0) die("the daemon has closed the control socket");
  if (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) die("a notice arrived cut off");
  int fd = -1;
  struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
  if (rights && rights->cmsg_type == SCM_RIGHTS) {
    int fds[MAX_FDS];
    size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(fds, CMSG_DATA(rights), count * sizeof(int));
    fd = fds[0];
    for (size_t i = 1; i < count; i++) close(fds[i]);  // no event loop here wants to be woken, nothing is described
  }
  return decode(frame, (size_t)size, fd);
}

void await_notice(struct session *session, const int *what, int before) {
  int64_t end = now_ms() + PATIENCE_MS;
  while (*what == before) {
    if (now_ms() >= end) die("other notices came, for %d ms", PATIENCE_MS);
    struct message notice = next_notice(session);
    if (notice.tag == ATTACHED) {
      if (session->directory >= 0) close(session->directory);
      session->directory = notice.fd;
    } else if (notice.tag == LANE_UP) {
      if (session->lifeline >= 0) close(session->lifeline);
      session->lifeline = notice.fd;
      copy_text(&notice, "endpoint", session->endpoint, sizeof session->endpoint);
    } else if (notice.tag == DETACHED) {
      close(session->directory);
      session->directory = -1;
    } else {
      die("notice 0x%02x", notice.tag);
    }
    message_free(&notice);
  }
}

// --------------------------------------------------------------------- requests

static void *dealer(struct session *session, const char *endpoint) {
  int none = 0, never = -1;
  void *socket = zmq_socket(session->context, ZMQ_DEALER);
  if (!socket) die("a DEALER: %s", zmq_strerror(zmq_errno()));
  zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof none);
  zmq_setsockopt(socket, ZMQ_RECONNECT_IVL, &never, sizeof never);
  if (zmq_connect(socket, endpoint) != 0) die("%s: %s", endpoint, zmq_strerror(zmq_errno()));
  return socket;
}

static void frame_header(uint8_t *at, enum tag tag, uint64_t id, const uint8_t *boot_id,
                         const uint8_t *token) {
  memcpy(at, MAGIC, sizeof MAGIC);
  put_le(at + 4, PROTOCOL_VERSION, 2);
  put_le(at + 6, tag, 2);
  put_le(at + 8, id, 8);
  memcpy(at + 16, boot_id, ID_BYTES);
  memcpy(at + 32, token, ID_BYTES);
}

static void send_request(struct session *session, void *socket, enum tag tag, uint64_t id,
                         struct body *body) {
  zmq_msg_t frame;
  if (zmq_msg_init_size(&frame, HEADER_BYTES + body->buffer.size) != 0) die("no memory");
  uint8_t *at = zmq_msg_data(&frame);
  frame_header(at, tag, id, tag == HELLO ? NO_ID : session->boot_id, session->token);
  memcpy(at + HEADER_BYTES, body->buffer.data, body->buffer.size);
  msgpack_sbuffer_destroy(&body->buffer);
  if (zmq_msg_send(&frame, socket, ZMQ_DONTWAIT) < 0) die("send: %s", zmq_strerror(zmq_errno()));
}

uint64_t ask_lane(struct lane *lane, enum tag tag, struct body *body) {
  send_request(lane->session, lane->jobs, tag, ++lane->last_id, body);
  return lane->last_id;
}

struct message answer(struct session *session, void *socket, uint64_t id, enum tag tag) {
  char text[4097] = "";
  zmq_msg_t frame;
  zmq_pollitem_t items[2] = {{.socket = socket, .events = ZMQ_POLLIN},
                             {.fd = session->control, .events = ZMQ_POLLERR}};
  if (zmq_poll(items, 2, PATIENCE_MS) <= 0) die("no answer within %d ms", PATIENCE_MS);
  if (!(items[0].revents & ZMQ_POLLIN)) die("the daemon is gone");
  zmq_msg_init(&frame);
  if (zmq_msg_recv(&frame, socket, ZMQ_DONTWAIT) < 0) die("%s", zmq_strerror(zmq_errno()));
  struct message reply = decode(zmq_msg_data(&frame), zmq_msg_size(&frame), -1);
  zmq_msg_close(&frame);
  if (memcmp(reply.boot_id, session->boot_id, ID_BYTES) != 0) die("another daemon answers");
  if (reply.request_id != id) die("an answer to another request");
  if (reply.tag == tag) return reply;
  if (reply.tag == ERROR) copy_text(&reply, "text", text, sizeof text);
  die("0x%02x in place of 0x%02x: %s", reply.tag, tag, text);
}

struct message exchange(struct session *session, enum tag tag, struct body *body,
                        enum tag reply) {
  send_request(session, session->requests, tag, ++session->last_id, body);
  return answer(session, session->requests, session->last_id, reply);
}

struct message exchange_with_fds(struct session *session, enum tag tag, struct body *body,
                                 const int *fds, size_t count, enum tag reply) {
  uint8_t head[HEADER_BYTES];
  union {
    struct cmsghdr header;
    char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
  } control = {0};
  if (count > MAX_FDS) die("%zu descriptors in one datagram", count);
  frame_header(head, tag, ++session->last_id, session->boot_id, session->token);
  struct iovec parts[2] = {{head, sizeof head}, {body->buffer.data, body->buffer.size}};
  struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = &control,
                          .msg_controllen = CMSG_SPACE(count * sizeof(int))};
  struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(count * sizeof(int));
  memcpy(CMSG_DATA(rights), fds, count * sizeof(int));
  if (sendmsg(session->control, &header, MSG_NOSIGNAL) < 0) die("sendmsg: %s", strerror(errno));
  msgpack_sbuffer_destroy(&body->buffer);
  return answer(session, session->requests, session->last_id, reply);
}

struct message exchange_lane(struct lane *lane, enum tag tag, struct body *body,
                             enum tag reply) {
  uint64_t id = ask_lane(lane, tag, body);
  return answer(lane->session, lane->jobs, id, reply);
}

void lane_open(struct lane *lane, struct session *session) {
  *lane = (struct lane){.session = session, .jobs = dealer(session, session->endpoint)};
}

void session_open(struct session *session, const char *runtime_dir, const char *kind,
                  const char *engine) {
  char endpoint[sizeof session->runtime_dir + 32];
  void *context = session->context;
  *session = (struct session){.context = context, .directory = -1, .lifeline = -1};
  snprintf(session->runtime_dir, sizeof session->runtime_dir, "%s", runtime_dir);
  control_connect(session);
  struct message greeting = next_notice(session);
  if (greeting.tag != GREETING) die("0x%02x in place of Greeting", greeting.tag);
  memcpy(session->boot_id, greeting.boot_id, ID_BYTES);
  memcpy(session->token, greeting.token, ID_BYTES);
  message_free(&greeting);
  snprintf(endpoint, sizeof endpoint, "ipc://%s/broker.sock", session->runtime_dir);
  session->requests = dealer(session, endpoint);
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

void session_close(struct session *session) {
  zmq_close(session->requests);
  close(session->control);
  if (session->directory >= 0) close(session->directory);
  if (session->lifeline >= 0) close(session->lifeline);
}
