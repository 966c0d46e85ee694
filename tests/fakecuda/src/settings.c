/* Switches (FAKECUDA_*), injected failures and hangs, the call log. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "api.h"
#include "fake.h"

#define MAX_RULES 64
#define INSTANT_REFRESH_SECONDS 0.05

typedef struct {
    char name[64];
    long nth;                  /* the n-th call from now on; 0: every call */
    bool onwards;              /* that one and all later ones */
    int code;                  /* 0: hang */
    bool sticky;
    long seen;
} Rule;

Settings settings;
static Rule rules[MAX_RULES];
static int rule_count;
static int log_fd = -1;
static const char *control_path;
static struct timespec control_time;
static off_t control_size = -1;
static ino_t control_inode;
static unsigned long hang_generation;
static __thread int capture_mode = CAPTURE_GLOBAL;

uint64_t draw(uint64_t *state) {
    uint64_t x = (*state += 0x9e3779b97f4a7c15ull);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

void nap(long microseconds) {
    if (microseconds <= 0) return;
    struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000};
    while (nanosleep(&left, &left)) {}
}

static long processor_ns(void) {
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return used.tv_sec * 1000000000l + used.tv_nsec;
}

void be_busy(size_t copies) {
    if (settings.call_ns <= 0) return;
    long end = processor_ns() + settings.call_ns * (long)copies;
    while (processor_ns() < end) {}
}

static void drop_rules(bool hangs) {
    int kept = 0;
    for (int i = 0; i < rule_count; i++)
        if ((rules[i].code == 0) != hangs) rules[kept++] = rules[i];
    rule_count = kept;
}

/* Whether a failure with this code, "code[!|~]", fails all later calls in the context. */
static bool costs_context(const char *code) {
    return !strchr(code, '~') && (strchr(code, '!') || is_sticky(atoi(code)));
}

/* "function:n[:code[!|~]]"; n is a number, "n+" or "*"; several with commas. */
static int add_rules(const char *text, bool hangs) {
    char copy[1024], *save = NULL;
    if (strlen(text) >= sizeof copy) return INVALID_VALUE;
    strcpy(copy, text);
    drop_rules(hangs);
    for (char *item = strtok_r(copy, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        char name[64] = "", when[32] = "1", code[32] = "304";
        if (sscanf(item, "%63[^:]:%31[^:]:%31s", name, when, code) < 1) return INVALID_VALUE;
        if (rule_count == MAX_RULES) return INVALID_VALUE;
        Rule *rule = &rules[rule_count++];
        memset(rule, 0, sizeof *rule);
        strcpy(rule->name, name);
        rule->nth = when[0] == '*' ? 0 : atol(when);
        rule->onwards = strchr(when, '+') != NULL;
        rule->code = hangs ? 0 : atoi(code);
        rule->sticky = costs_context(code);
        if (!hangs && rule->code <= 0) return INVALID_VALUE;
    }
    return SUCCESS;
}

/* One "key=value", keys as in the environment but lower case, without the prefix. */
static int apply(const char *text) {
    char key[64];
    const char *value = strchr(text, '=');
    if (!value) value = text + strlen(text);
    size_t length = (size_t)(value - text);
    if (length == 0 || length >= sizeof key) return INVALID_VALUE;
    memcpy(key, text, length);
    key[length] = 0;
    if (*value == '=') value++;

    if (!strcmp(key, "fail")) return add_rules(value, false);
    if (!strcmp(key, "hang")) return add_rules(value, true);
    if (!strcmp(key, "unhang")) {
        drop_rules(true);
        hang_generation++;
    } else if (!strcmp(key, "seed")) {
        settings.seeded = *value != 0;
        settings.seed = strtoull(value, NULL, 0);
    } else if (!strcmp(key, "any"))
        settings.any = !strcmp(value, "early") ? 1 : !strcmp(value, "random") ? 2 : 0;
    else if (!strcmp(key, "hold")) {
        settings.hold_copies = strstr(value, "copies") != NULL;
        settings.hold_kernels = strstr(value, "kernels") != NULL;
        settings.hold_values = strstr(value, "values") != NULL;
    } else if (!strcmp(key, "devices")) settings.devices = atoi(value);
    else if (!strcmp(key, "driver_version")) settings.driver_version = atoi(value);
    else if (!strcmp(key, "mem_ops")) settings.mem_ops = value[0] == '1';
    else if (!strcmp(key, "max_pin")) settings.max_pin = strtoull(value, NULL, 0);
    else if (!strcmp(key, "vmm_ranges")) settings.vmm_ranges = value[0] != '0';
    else if (!strcmp(key, "elsewhere")) settings.elsewhere = value[0] != '0';
    else if (!strcmp(key, "copies")) settings.instant = !strcmp(value, "instant");
    else if (!strcmp(key, "call_ns")) settings.call_ns = atol(value);
    else if (!strcmp(key, "pin_ns")) settings.pin_ns = atol(value);
    else if (!strcmp(key, "unpin_ns")) settings.unpin_ns = atol(value);
    else if (!strcmp(key, "compute_mode")) settings.compute_mode = atoi(value);
    else if (!strcmp(key, "mps")) settings.mps = value[0] == '1';
    else if (!strcmp(key, "handles")) {
        settings.handle_code = atoi(value);
        settings.handle_sticky = costs_context(value);
    } else if (!strcmp(key, "capture")) settings.capture = value[0] == '1';
    else return INVALID_VALUE;
    return SUCCESS;
}

static void refuse_setting(const char *text) {
    fprintf(stderr, "fakecuda (a test double): bad setting '%s'\n", text);
    _exit(70);
}

__attribute__((constructor)) static void settings_start(void) {
    settings = (Settings){.devices = 1, .driver_version = 13000, .mem_ops = true,
                          .vmm_ranges = true, .elsewhere = true};
    static const char *const keys[] = {
        "SEED", "ANY", "HOLD", "DEVICES", "DRIVER_VERSION", "MEM_OPS", "MAX_PIN",
        "VMM_RANGES", "ELSEWHERE", "COPIES", "CALL_NS", "PIN_NS", "UNPIN_NS",
        "COMPUTE_MODE", "MPS", "CAPTURE", "HANDLES", "FAIL", "HANG",
    };
    if (getenv("FAKECUDA_SEED")) settings.any = 2;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char name[80], line[1200];
        snprintf(name, sizeof name, "FAKECUDA_%s", keys[i]);
        const char *value = getenv(name);
        if (!value) continue;
        snprintf(line, sizeof line, "%s=%s", keys[i], value);
        for (char *c = line; *c && *c != '='; c++)
            if (*c >= 'A' && *c <= 'Z') *c += 'a' - 'A';
        if (apply(line)) refuse_setting(line);
    }
    if (settings.devices < 0 || settings.devices > MAX_DEVICES) refuse_setting("devices");
    control_path = getenv("FAKECUDA_CONTROL");
    const char *log = getenv("FAKECUDA_LOG");
    if (log) log_fd = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
}

void log_line(const char *name) {
    if (log_fd < 0) return;
    char line[128];
    int length = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), name);
    if (write(log_fd, line, (size_t)length) < 0) return;
}

void settings_refresh(void) {
    static double looked;
    struct stat now;
    if (!control_path) return;
    if (settings.instant) { /* to look costs more than the rest of a call */
        double seconds = now_seconds();
        if (seconds - looked < INSTANT_REFRESH_SECONDS) return;
        looked = seconds;
    }
    if (stat(control_path, &now)) return;
    if (now.st_ino == control_inode && now.st_size == control_size &&
        now.st_mtim.tv_sec == control_time.tv_sec && now.st_mtim.tv_nsec == control_time.tv_nsec)
        return;
    control_inode = now.st_ino;
    control_size = now.st_size;
    control_time = now.st_mtim;
    FILE *file = fopen(control_path, "re");
    if (!file) return;
    char line[1200];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (*line && apply(line)) refuse_setting(line);
    }
    fclose(file);
}

/* Whether a rule fires for this call; the lock is held. */
static Rule *fires(const char *name) {
    Rule *found = NULL;
    for (int i = 0; i < rule_count; i++) {
        Rule *rule = &rules[i];
        if (strcmp(rule->name, name)) continue;
        rule->seen++;
        if (rule->nth == 0 || rule->seen == rule->nth || (rule->onwards && rule->seen > rule->nth))
            if (!found) found = rule;
    }
    return found;
}

/* Never returns, until a test says "unhang". The lock is held. */
static void hang(void) {
    unsigned long generation = hang_generation;
    log_line("@hang");
    while (generation == hang_generation) {
        pthread_mutex_unlock(&lock);
        nap(2000);
        pthread_mutex_lock(&lock);
        settings_refresh();
    }
}

static CUresult inject(const char *name, struct Context *context) {
    log_line(name);
    settings_refresh();
    Rule *rule = fires(name);
    if (!rule) return SUCCESS;
    if (rule->code == 0) {
        hang();
        return SUCCESS;
    }
    int code = rule->code;
    if (rule->sticky && context) poison(context, code);
    return code;
}

/* Calls that CUDA may forbid a thread while another one captures. */
static bool is_unsafe(const char *name) {
    static const char *const unsafe[] = {
        "cuMemAlloc", "cuMemFree", "cuMemHostRegister", "cuMemHostUnregister", "cuEventQuery",
        "cuEventSynchronize", "cuStreamQuery", "cuStreamSynchronize", "cuCtxSynchronize",
        "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemsetD8", "cuIpcGetMemHandle", "cuIpcOpenMemHandle",
        "cuIpcCloseMemHandle",
    };
    for (size_t i = 0; i < sizeof unsafe / sizeof *unsafe; i++)
        if (!strcmp(name, unsafe[i])) return true;
    return false;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER("cuThreadExchangeStreamCaptureMode", NEEDS_NOTHING);
    if (*mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return INVALID_VALUE;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

CUresult enter(const char *name, Needs needs) {
    pthread_mutex_lock(&lock);
    struct Context *context = current;
    CUresult result = inject(name, context);
    if (!result && needs >= NEEDS_INIT && !initialised) result = NOT_INITIALIZED;
    if (!result && settings.capture && capture_mode == CAPTURE_GLOBAL && is_unsafe(name)) {
        log_line("@broken-capture");
        result = CAPTURE_UNSUPPORTED;
    }
    if (!result && needs == NEEDS_CONTEXT) {
        if (!context) result = INVALID_CONTEXT;
        else if (context->fault) result = context->fault;
        else if (!context->users) result = CONTEXT_IS_DESTROYED;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult enter_work(const char *name) {
    pthread_mutex_lock(&lock);
    CUresult result = inject(name, NULL);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult fakecuda_set(const char *text) {
    pthread_mutex_lock(&lock);
    CUresult result = apply(text);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return result;
}
