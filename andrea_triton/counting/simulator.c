/* One multiprocessor (SM) that runs a kernel's programs, event by event. simulator.py prepares the steps and says what every
   field means; a course has segments that alternate: what lies before a loop, one trip of it, what lies before the next ...

   Warps run in order. Each of the four schedulers issues one instruction a clock, of the warp it issued last if it can, else of
   the youngest program. A warp waits for the scoreboards that its instruction names, for the pipe, and for groups of copies or
   products. Values are never computed. */
#include <math.h>
#include <stdlib.h>

enum { TENSOR, WGMMA, FMA, ALU, SPECIAL, SHARED, COPY, LOAD, STORE, BULK, COMMIT, COPY_WAIT, WGMMA_WAIT, BARRIER, POLL, OTHER };
enum { SCHEDULERS = 4, BOARDS = 6, GROUPS = 64 };

typedef struct {
  int unit;
  double interval, latency; /* clocks of the pipe, and until a result is there (0: not known) */
  int bytes, extra;         /* moved; groups that may be under way (waits), or whether a group ends (wgmma) */
  int stall, writes, reads, waits; /* control bits: clocks to the next, scoreboards set (7: none), those waited for */
  int ahead;                /* trips that a load runs ahead of its loop: off when so few are left */
} Step;

typedef struct {
  double l2, barrier, wgmma, bulk, bulk_bytes, launch; /* bytes a clock, clocks, bytes, clocks */
  int joined, seed;
} Rates;

typedef struct Program Program;
typedef struct {
  Program *program;
  int index, segment, place, left, polls, copies, products, done;
  const int *trips;
  long age;
  double ready, board[BOARDS], copied[GROUPS], multiplied[GROUPS], open;
} Warp;
struct Program {
  Warp *warps;
  int arrived, running, bulks, room;
  double *bulk; /* when each bulk copy has landed */
};

typedef struct {
  int segments, warps, loops, programs, next, live, resident;
  const int *length, *offset, *trips;
  const Step *steps;
  Rates rates;
  unsigned random, jitter;
  long age;
  Warp **waiting[SCHEDULERS], *last[SCHEDULERS];
  int count[SCHEDULERS];
  double clock[SCHEDULERS], tensor[SCHEDULERS], products[SCHEDULERS], pipe[3][SCHEDULERS], memory[SCHEDULERS];
  double port, l2, memory_all, end, busy[4]; /* busy: tensor, issue, special, port */
} Machine;

static double later(double a, double b) { return a > b ? a : b; }

/* Past the end of a segment: another trip, or the next segment that has any. 1 at the end of the course. */
static int turn(const Machine *m, Warp *w) {
  while (w->segment < m->segments && w->place >= m->length[w->segment]) {
    w->place = 0;
    if (w->segment % 2 && w->left > 1) { w->left--; continue; }
    w->segment++;
    if (w->segment < m->segments && w->segment % 2) {
      w->left = w->trips[w->segment / 2];
      if (w->left <= 0) { w->left = 0; w->place = m->length[w->segment]; }
    }
  }
  return w->segment >= m->segments;
}

/* A program takes the room of one that ended. Its first instructions come a little later, by chance, as on a card. */
static void begin(Machine *m, double now) {
  Program *p = calloc(1, sizeof *p);
  p->warps = calloc(m->warps, sizeof(Warp));
  p->running = m->warps;
  m->random = m->random * 1664525u + 1013904223u;
  m->jitter = m->random >> 23;
  m->age++;
  m->live++;
  for (int i = 0; i < m->warps; i++) {
    Warp *w = &p->warps[i];
    w->program = p;
    w->index = i;
    w->age = m->age;
    w->ready = now + m->rates.launch + m->jitter;
    w->trips = m->trips + m->next * m->loops;
    m->waiting[i % SCHEDULERS][m->count[i % SCHEDULERS]++] = w;
    turn(m, w);
  }
  m->next++;
}

/* Whether the predicate of a load turns it off: of a trip past the last, or of the first fill of a loop with fewer trips. In a
   joined course one loop lies in two segments, 1 and 3. */
static int is_off(const Machine *m, const Warp *w, const Step *s) {
  if (!s->ahead) return 0;
  int more = m->rates.joined && w->segment < 2 ? w->trips[1] : 0;
  if (w->segment % 2) return w->left + more <= s->ahead;
  return w->segment / 2 < m->loops && w->trips[w->segment / 2] + more < s->ahead;
}

/* When the step may issue at the earliest; infinite while the copy that it polls for has not even begun. */
static double earliest(const Machine *m, const Warp *w, const Step *s, int k, double now) {
  double t = now;
  for (int b = 0; b < BOARDS; b++) if (s->waits >> b & 1) t = later(t, w->board[b]);
  switch (s->unit) {
    case COPY_WAIT: return w->copies > s->extra ? later(t, w->copied[(w->copies - 1 - s->extra) % GROUPS]) : t;
    case WGMMA_WAIT: return w->products > s->extra ? later(t, w->multiplied[(w->products - 1 - s->extra) % GROUPS]) : t;
    case POLL: return w->program->bulks <= w->polls ? INFINITY : later(t, w->program->bulk[w->polls]);
    case TENSOR: return later(t, m->tensor[k]);
    case FMA: case ALU: case SPECIAL: return later(t, m->pipe[s->unit - FMA][k]);
    case SHARED: case COPY: case LOAD: case STORE: return later(t, later(m->memory[k], m->memory_all));
  }
  return t;
}

/* A wide product: its warpgroup's operands pass the port of shared memory once. */
static void multiply(Machine *m, Warp *w, const Step *s, int k, double now) {
  double start = later(now, m->products[k]);
  if (w->index % 4 == 0) {
    m->port = later(m->port, now) + s->bytes / 128.0;
    m->busy[3] += s->bytes / 128.0;
  }
  m->products[k] = later(start + s->interval, m->port);
  m->busy[0] += s->interval;
  if (s->extra) w->multiplied[w->products++ % GROUPS] = m->products[k] + m->rates.wgmma;
}

/* Loads, stores and copies share a queue per scheduler and the port; what comes from L2 shares its bandwidth. When it is done. */
static double move(Machine *m, Warp *w, const Step *s, int k, double now, int off) {
  int full = m->memory[k] > now - 5 * s->interval && m->memory[k] > now;
  m->memory[k] = (full ? m->memory[k] : now) + s->interval;
  m->memory_all = now + 2;
  if (off) return now + 4;
  m->port = later(m->port, now) + s->bytes / 128.0;
  m->busy[3] += s->bytes / 128.0;
  double done = m->port + s->latency;
  if (s->unit == COPY || s->unit == LOAD) {
    m->l2 = later(m->l2, now) + s->bytes / m->rates.l2;
    done = later(done, m->l2 + s->latency);
    if (s->unit == COPY) w->open = later(w->open, done);
  }
  return done;
}

/* A bulk copy, which one warp of the program starts; whoever polled before it wakes. */
static void bulk(Machine *m, Warp *w, const Step *s, double now, int off) {
  Program *p = w->program;
  if (w->index || off) return;
  m->l2 = later(m->l2, now) + (s->bytes ? s->bytes : m->rates.bulk_bytes) / m->rates.l2;
  if (p->bulks == p->room) {
    p->room = p->room ? 2 * p->room : 64;
    p->bulk = realloc(p->bulk, p->room * sizeof(double));
  }
  p->bulk[p->bulks++] = m->l2 + m->rates.bulk;
  for (int i = 0; i < m->warps; i++) {
    Warp *x = &p->warps[i];
    if (!x->done && isinf(x->ready) && m->steps[m->offset[x->segment] + x->place].unit == POLL) x->ready = now;
  }
}

static double issue(Machine *m, Warp *w, const Step *s, int k, double now) {
  double done = now + s->latency;
  int off = is_off(m, w, s);
  switch (s->unit) {
    case TENSOR: m->tensor[k] = now + s->interval; m->busy[0] += s->interval; break;
    case WGMMA: multiply(m, w, s, k, now); break;
    case SPECIAL: m->busy[2] += s->interval; /* fall through */
    case FMA: case ALU: m->pipe[s->unit - FMA][k] = now + s->interval; break;
    case SHARED: case COPY: case LOAD: case STORE: return move(m, w, s, k, now, off);
    case COMMIT: w->copied[w->copies++ % GROUPS] = w->open; w->open = 0; return now + 4;
    case BULK: bulk(m, w, s, now, off); break;
    case POLL: w->polls++; break;
  }
  return done;
}

/* After an issue: scoreboards, the next place, barriers, the end of a program. */
static void advance(Machine *m, Warp *w, const Step *s, int k, double now, double done) {
  Program *p = w->program;
  if (s->writes < BOARDS) w->board[s->writes] = later(w->board[s->writes], s->latency ? done : now + 12);
  if (s->reads < BOARDS) w->board[s->reads] = later(w->board[s->reads], done < now + 14 ? done : now + 14);
  w->ready = now + (s->stall > 1 ? s->stall : 1);
  m->last[k] = w;
  m->clock[k] = now + 1;
  w->place++;
  int ended = w->place >= m->length[w->segment] && turn(m, w);
  if (s->unit == BARRIER && !ended) { w->ready = INFINITY; p->arrived++; }
  if (ended) {
    w->done = 1;
    for (int i = 0; i < m->count[k]; i++)
      if (m->waiting[k][i] == w) { m->waiting[k][i] = m->waiting[k][--m->count[k]]; break; }
    m->last[k] = 0;
    m->end = later(m->end, now);
    p->running--;
  }
  if (p->running && p->arrived == p->running) {
    for (int i = 0; i < m->warps; i++) if (!p->warps[i].done) p->warps[i].ready = now + m->rates.barrier;
    p->arrived = 0;
  }
  if (!p->running) {
    free(p->warps);
    free(p->bulk);
    free(p);
    m->live--;
    if (m->next < m->programs) begin(m, now);
  }
}

/* Clocks until all programs are done, and busy clocks in out[1 ..]; -1 where every warp waits for ever. */
double simulate(int segments, const int *length, const int *offset, const Step *steps, int warps, int resident, int programs,
                int loops, const int *trips, const Rates *rates, double *out) {
  Machine m = {.segments = segments, .warps = warps, .loops = loops, .programs = programs, .resident = resident,
               .length = length, .offset = offset, .trips = trips, .steps = steps, .rates = *rates, .random = rates->seed};
  for (int k = 0; k < SCHEDULERS; k++) m.waiting[k] = calloc(resident * warps + 1, sizeof *m.waiting[k]);
  while (m.next < programs && m.live < resident) begin(&m, 0.0);
  while (m.live) {
    int k = -1;
    double now = INFINITY;
    for (int j = 0; j < SCHEDULERS; j++)
      for (int i = 0; i < m.count[j]; i++) {
        double t = later(m.waiting[j][i]->ready, m.clock[j]);
        if (t < now) { now = t; k = j; }
      }
    if (k < 0) { m.end = -1; break; }
    Warp *w = 0;
    for (int i = 0; i < m.count[k]; i++) {
      Warp *x = m.waiting[k][i];
      if (x->ready <= now && (!w || x == m.last[k] || (w != m.last[k] && x->age >= w->age))) w = x;
    }
    const Step *s = &steps[offset[w->segment] + w->place];
    double t = earliest(&m, w, s, k, now);
    if (t > now) { w->ready = t; continue; }
    m.busy[1]++;
    advance(&m, w, s, k, now, issue(&m, w, s, k, now));
  }
  for (int k = 0; k < SCHEDULERS; k++) free(m.waiting[k]);
  out[0] = m.end;
  for (int i = 0; i < 4; i++) out[i + 1] = m.busy[i];
  return m.end;
}
