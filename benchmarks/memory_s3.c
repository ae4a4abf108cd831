/* An S3 server that keeps objects in memory, for benchmarks of clients: as little between socket and memory as can be.
 *
 *     cc -O2 -pthread -o memory_s3 memory_s3.c && ./memory_s3        prints its port, serves 127.0.0.1 until stdin ends
 *
 * One thread per connection. GET, HEAD, PUT (If-None-Match: *), DELETE, ListObjectsV2; any bucket, path-style. It
 * checks no signature, no checksum and no digest, knows no multipart upload and no TLS: it is no store, and what it
 * proves is how fast a client can be.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/uio.h>
#include <unistd.h>

enum { HEAD_MAX = 1 << 16, SLOTS = 1 << 16, PAGE = 1000 };
#define DATE "Thu, 01 Jan 2026 00:00:00 GMT"

typedef struct object {
    char *name, *bytes;
    size_t size;
    int users; /* the table is one of them */
    struct object *next;
} object;

static object *table[SLOTS];
static size_t objects;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *must(void *memory) {
    if (!memory) {
        fputs("out of memory\n", stderr);
        exit(1);
    }
    return memory;
}

/* The table. */

static object **place(const char *name) {
    unsigned hash = 2166136261u;
    for (const char *c = name; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    object **found = &table[hash % SLOTS];
    while (*found && strcmp((*found)->name, name)) found = &(*found)->next;
    return found;
}

static void let_go(object *one) {
    pthread_mutex_lock(&lock);
    int last = --one->users == 0;
    pthread_mutex_unlock(&lock);
    if (last) free(one->name), free(one->bytes), free(one);
}

static object *find(const char *name) {
    pthread_mutex_lock(&lock);
    object *one = *place(name);
    if (one) one->users++;
    pthread_mutex_unlock(&lock);
    return one;
}

static void take_out(const char *name) {
    pthread_mutex_lock(&lock);
    object **at = place(name), *one = *at;
    if (one) *at = one->next, objects--;
    pthread_mutex_unlock(&lock);
    if (one) let_go(one);
}

/* The bytes become the table's; 0 if the name is taken and may not be. */
static int put_in(const char *name, char *bytes, size_t size, int only_new) {
    object *one = must(calloc(1, sizeof *one)), *old;
    *one = (object){.name = must(strdup(name)), .bytes = bytes, .size = size, .users = 1};
    pthread_mutex_lock(&lock);
    object **at = place(name);
    old = *at;
    if (old && only_new) {
        pthread_mutex_unlock(&lock);
        let_go(one);
        return 0;
    }
    one->next = old ? old->next : NULL;
    *at = one;
    objects += !old;
    pthread_mutex_unlock(&lock);
    if (old) let_go(old);
    return 1;
}

/* Text that grows. */

typedef struct {
    char *at;
    size_t size, room;
} text;

static void say(text *out, const char *format, ...) {
    for (;;) {
        va_list values;
        va_start(values, format);
        size_t left = out->room - out->size, need = (size_t)vsnprintf(out->at + out->size, left, format, values);
        va_end(values);
        if (need < left) {
            out->size += need;
            return;
        }
        out->at = must(realloc(out->at, out->room = 2 * (out->room + need)));
    }
}

/* The wire. */

static int send_both(int wire, const char *head, size_t head_size, const char *body, size_t body_size) {
    struct iovec parts[2] = {{(void *)head, head_size}, {(void *)body, body_size}};
    int first = 0;
    while (first < 2) {
        ssize_t sent = writev(wire, parts + first, 2 - first);
        if (sent <= 0) return 0;
        while (first < 2 && (size_t)sent >= parts[first].iov_len) sent -= (ssize_t)parts[first++].iov_len;
        if (first < 2) parts[first].iov_base = (char *)parts[first].iov_base + sent, parts[first].iov_len -= (size_t)sent;
    }
    return 1;
}

static int answer(int wire, int status, size_t size, const char *extra, const char *body, size_t body_size) {
    char head[512];
    int length = snprintf(head, sizeof head,
                          "HTTP/1.1 %d x\r\nContent-Length: %zu\r\nETag: \"0\"\r\nLast-Modified: " DATE "\r\n%s\r\n",
                          status, size, extra);
    return send_both(wire, head, (size_t)length, body, body_size);
}

static int refuse(int wire, int status, const char *code, int head_only) {
    char body[200];
    int size = snprintf(body, sizeof body, "<Error><Code>%s</Code></Error>", code);
    return answer(wire, status, (size_t)size, "", body, head_only ? 0 : (size_t)size);
}

static void decode(char *name) {
    char *to = name;
    for (char *from = name; *from; from++) {
        unsigned value;
        if (*from == '%' && sscanf(from + 1, "%2x", &value) == 1) *to++ = (char)value, from += 2;
        else *to++ = *from;
    }
    *to = 0;
}

/* A value of the query, decoded; "" if it is not there. */
static char *asked(const char *query, const char *name) {
    size_t length = strlen(name);
    for (const char *at = query; at && *at; at = strchr(at, '&') ? strchr(at, '&') + 1 : NULL)
        if (!strncmp(at, name, length) && at[length] == '=') {
            char *value = must(strndup(at + length + 1, strcspn(at + length + 1, "&")));
            decode(value);
            return value;
        }
    return must(strdup(""));
}

static int by_name(const void *a, const void *b) { return strcmp((*(object **)a)->name, (*(object **)b)->name); }

static int list(int wire, const char *bucket, const char *query) {
    char *prefix = asked(query, "prefix"), *delimiter = asked(query, "delimiter");
    char *token = asked(query, "continuation-token"), *start = asked(query, "start-after");
    const char *after = *token ? token : start;
    size_t skip = strlen(bucket) + 1, length = strlen(prefix), count = 0, said = 0;
    text out = {must(malloc(1 << 16)), 0, 1 << 16};
    char *last = must(strdup("")), *group = must(strdup(""));
    say(&out, "<ListBucketResult><Name>%s</Name><Prefix>%s</Prefix>", bucket, prefix);
    pthread_mutex_lock(&lock);
    object **all = must(malloc((objects + 1) * sizeof *all));
    for (int slot = 0; slot < SLOTS; slot++)
        for (object *one = table[slot]; one; one = one->next)
            if (!strncmp(one->name, bucket, skip - 1) && one->name[skip - 1] == '/' &&
                !strncmp(one->name + skip, prefix, length) && strcmp(one->name + skip, after) > 0)
                all[count++] = one;
    qsort(all, count, sizeof *all, by_name);
    size_t each = 0;
    for (; each < count && said < PAGE; each++) {
        const char *name = all[each]->name + skip, *end = *delimiter ? strstr(name + length, delimiter) : NULL;
        if (end) {
            size_t size = (size_t)(end - name) + strlen(delimiter);
            if (strlen(group) == size && !strncmp(group, name, size)) continue;
            if (strlen(after) >= size && !strncmp(after, name, size)) continue;
            free(group);
            group = must(strndup(name, size));
            say(&out, "<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>", group);
        } else
            say(&out,
                "<Contents><Key>%s</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;0&quot;</ETag>"
                "<Size>%zu</Size></Contents>",
                name, all[each]->size);
        free(last);
        last = must(strdup(name));
        said++;
    }
    pthread_mutex_unlock(&lock);
    say(&out, "<KeyCount>%zu</KeyCount><IsTruncated>%s</IsTruncated>", said, each < count ? "true" : "false");
    if (each < count) say(&out, "<NextContinuationToken>%s</NextContinuationToken>", last);
    say(&out, "</ListBucketResult>");
    int fine = answer(wire, 200, out.size, "Content-Type: application/xml\r\n", out.at, out.size);
    free(prefix), free(delimiter), free(token), free(start), free(last), free(group), free(all), free(out.at);
    return fine;
}

static int get(int wire, const char *name, const char *range, int head_only) {
    object *one = find(name);
    if (!one) return refuse(wire, 404, "NoSuchKey", head_only);
    size_t from = 0, to = one->size;
    char extra[100] = "";
    if (range && sscanf(range, "bytes=%zu-%zu", &from, &to) >= 1) {
        to = to < one->size ? to + 1 : one->size;
        if (from > to) from = to;
        snprintf(extra, sizeof extra, "Content-Range: bytes %zu-%zu/%zu\r\n", from, to - 1, one->size);
    }
    int fine = answer(wire, *extra ? 206 : 200, to - from, extra, one->bytes + from, head_only ? 0 : to - from);
    let_go(one);
    return fine;
}

/* `have` bytes of the body came with the head. */
static int put(int wire, const char *name, size_t size, const char *begun, size_t have, int only_new) {
    char *bytes = must(malloc(size + 1));
    memcpy(bytes, begun, have);
    while (have < size) {
        ssize_t came = read(wire, bytes + have, size - have);
        if (came <= 0) {
            free(bytes);
            return 0;
        }
        have += (size_t)came;
    }
    return put_in(name, bytes, size, only_new) ? answer(wire, 200, 0, "", "", 0)
                                               : refuse(wire, 412, "PreconditionFailed", 0);
}

static const char *header(const char *head, const char *name) {
    for (const char *line = strstr(head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, name, strlen(name)) && line[2 + strlen(name)] == ':') {
            const char *value = line + 3 + strlen(name);
            while (*value == ' ') value++;
            return value;
        }
    return NULL;
}

static void *serve(void *given) {
    int wire = (int)(long)given, fine = 1;
    char *head = must(malloc(HEAD_MAX + 1));
    size_t have = 0;
    while (fine) {
        char *end;
        head[have] = 0;
        while (!(end = memmem(head, have, "\r\n\r\n", 4))) {
            ssize_t came = have < HEAD_MAX ? read(wire, head + have, HEAD_MAX - have) : 0;
            if (came <= 0) goto over;
            head[have += (size_t)came] = 0;
        }
        *end = 0;
        size_t head_size = (size_t)(end - head) + 4, body = 0, begun;
        char verb[16], target[8192];
        if (sscanf(head, "%15s %8191s", verb, target) != 2) break;
        const char *length = header(head, "Content-Length"), *range = header(head, "Range");
        int only_new = header(head, "If-None-Match") != NULL, waits = header(head, "Expect") != NULL;
        if (length) body = strtoull(length, NULL, 10);
        begun = have - head_size < body ? have - head_size : body;
        char *query = strchr(target, '?'), *name = target + 1;
        if (query) *query++ = 0;
        decode(name);
        size_t parts = strlen(name);
        if (parts && name[parts - 1] == '/' && strchr(name, '/') == name + parts - 1) name[--parts] = 0;
        if (waits) fine = send_both(wire, "HTTP/1.1 100 Continue\r\n\r\n", 25, "", 0);
        if (!strcmp(verb, "PUT")) fine = put(wire, name, body, head + head_size, begun, only_new);
        else if (!strcmp(verb, "DELETE")) take_out(name), fine = answer(wire, 204, 0, "", "", 0);
        else if (!strcmp(verb, "HEAD")) fine = strchr(name, '/') ? get(wire, name, NULL, 1) : answer(wire, 200, 0, "", "", 0);
        else if (!strcmp(verb, "GET")) fine = strchr(name, '/') ? get(wire, name, range, 0) : list(wire, name, query);
        else refuse(wire, 501, "NotImplemented", 0), fine = 0;
        memmove(head, head + head_size + begun, have -= head_size + begun);
    }
over:
    free(head);
    close(wire);
    return NULL;
}

static void *end_with_stdin(void *nothing) {
    char byte;
    while (read(0, &byte, 1) > 0) continue;
    exit(0);
    return nothing;
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    pthread_t thread;
    signal(SIGPIPE, SIG_IGN);
    /* What was freed is used again: fresh pages would cost as much as a client does. */
    mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), mallopt(M_TOP_PAD, 64 << 20);
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1024) ||
        getsockname(listener, (struct sockaddr *)&address, &size)) {
        perror("memory_s3");
        return 1;
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    pthread_create(&thread, NULL, end_with_stdin, NULL);
    for (;;) {
        int wire = accept(listener, NULL, NULL);
        if (wire < 0) continue;
        setsockopt(wire, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        if (pthread_create(&thread, NULL, serve, (void *)(long)wire)) close(wire);
        else pthread_detach(thread);
    }
}
