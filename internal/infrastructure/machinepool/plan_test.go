package machinepool

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// pool parses machines: a name, and after a colon one letter for each property: a available, o outdated and replaced,
// b outdated and waiting for an update in place, l leaving, s leaving and stuck, f failed, r to be remediated, m marked for
// deletion, u updated in place, t the same with a host that answers, w its update in place was refused, c drained for an update; after a slash the failure domain. Each machine
// is older than the next.
func pool(machines ...string) []instance {
	var out []instance
	for n, m := range machines {
		m, domain, _ := strings.Cut(m, "/")
		name, flags, _ := strings.Cut(m, ":")
		has := func(flag string) bool { return strings.Contains(flags, flag) }
		out = append(out, instance{
			name: name, created: epoch.Add(time.Duration(n) * time.Minute), domain: domain,
			available: has("a"), outdated: has("o"), behind: strings.ContainsAny(flags, "obutw"), leaving: has("l") || has("s"), stuck: has("s"), failed: has("f"), remediate: has("r"), marked: has("m"),
			update: updateState{begun: strings.ContainsAny(flags, "utw"), current: strings.ContainsAny(flags, "utw"), attended: has("t"), refused: has("w"), drained: has("c")},
		})
	}
	return out
}

func TestMakePlan(t *testing.T) { //nolint:funlen // one line for each case
	surge := budget{maxSurge: 1}
	inPlace := budget{maxUnavailable: 1}
	for _, tc := range []struct {
		name     string
		replicas int
		budget   budget
		frozen   bool
		policy   infrav1.DeletePolicy
		domains  []string
		open     []string
		pool     []instance
		create   int
		in       []string
		remove   []string
		why      string
	}{
		{name: "nothing to do", replicas: 2, budget: surge, pool: pool("a:a", "b:a")},
		{name: "no machines wanted, none there", replicas: 0, budget: surge},

		// More replicas.
		{name: "0 to n at once", replicas: 5, budget: surge, create: 5},
		{name: "n to more, while the first ones still come up", replicas: 5, budget: surge, pool: pool("a:a", "b"), create: 3},
		{name: "what leaves is replaced within maxSurge", replicas: 3, budget: surge, pool: pool("a:a", "b:l", "c:l"), create: 1},
		{name: "without a surge what leaves is replaced when it is gone", replicas: 3, budget: inPlace, pool: pool("a:a", "b:a", "c:l")},
		{name: "what cannot leave is replaced at once", replicas: 3, budget: surge, pool: pool("a:a", "b:s", "c:s"), create: 2},
		{name: "a dead host holds no remediation back", replicas: 4, budget: surge, pool: pool("a:a", "b:a", "c:r", "d:s", "e:a"), remove: []string{"c"}, create: 1},
		{name: "failed machines are reported, not replaced", replicas: 2, budget: surge, pool: pool("a:a", "b:f")},

		// Failure domains.
		{name: "new machines are spread", replicas: 4, budget: surge, domains: []string{"y", "x"}, pool: pool("a:a/x"), create: 3, in: []string{"y", "x", "y"}},
		{name: "outdated machines do not count for the spread", replicas: 2, budget: surge, domains: []string{"x", "y"}, pool: pool("a:ao/x", "b:ao/y", "c:l/x"), create: 0},
		{name: "the replacement goes where nobody up to date is", replicas: 2, budget: surge, domains: []string{"x", "y"}, pool: pool("a:a/x", "b:ao/x"), create: 1, in: []string{"y"}},
		{name: "a closed domain gets no machines", replicas: 4, budget: surge, domains: []string{"x", "y"}, open: []string{"y"}, pool: pool("a:a/x", "b:a/y", "c:a/y"), create: 1, in: []string{"y"}},
		{name: "the replacement on a lost host goes to an open domain", replicas: 2, budget: surge, domains: []string{"x", "y", "z"}, open: []string{"y", "z"}, pool: pool("a:s/x", "b:a/y"), create: 1, in: []string{"z"}},
		{name: "the fullest domain shrinks first", replicas: 2, budget: surge, domains: []string{"x", "y"}, pool: pool("a:a/x", "b:a/y", "c:a/y"), remove: []string{"b"}},
		{name: "the fullest domain shrinks first, also before updates in place", replicas: 2, budget: surge, domains: []string{"x", "y"}, pool: pool("a:ab/x", "b:ab/x", "c:ab/y", "d:ab/y"), remove: []string{"a", "c"}},
		{name: "the same while none of them is available", replicas: 2, budget: surge, domains: []string{"x", "y"}, pool: pool("a:b/x", "b:b/x", "c:b/y", "d:b/y"), remove: []string{"a", "c"}},
		{name: "what is replaced anyway goes by age alone", replicas: 2, budget: budget{maxUnavailable: 1}, domains: []string{"x", "y"}, pool: pool("a:ao/x", "b:ao/y", "c:ao/y"), remove: []string{"a", "b"}},

		// Fewer replicas: the machines that are removed.
		{name: "to zero", replicas: 0, budget: surge, pool: pool("a:a", "b", "c:f"), remove: []string{"c", "b", "a"}, why: "3 more than replicas"},
		{name: "who leaves already counts", replicas: 2, budget: surge, pool: pool("a:a", "b:l", "c:a", "d:a"), remove: []string{"a"}},
		{name: "enough leave already", replicas: 2, budget: surge, pool: pool("a:a", "b:l", "c:a", "d:l")},
		{name: "marked first", replicas: 2, budget: surge, pool: pool("a:f", "b:a", "c:am"), remove: []string{"c"}},
		{name: "marked, never more than the excess", replicas: 2, budget: surge, pool: pool("a:am", "b:am", "c:am"), remove: []string{"a"}},
		{name: "marked alone is no reason to go", replicas: 2, budget: surge, pool: pool("a:am", "b:a")},
		{name: "failed before outdated", replicas: 1, budget: inPlace, pool: pool("a:a", "b:ao", "c:f"), remove: []string{"c", "b"}},
		{name: "outdated before what is up to date", replicas: 2, budget: budget{maxUnavailable: 1}, pool: pool("a:a", "b:a", "c:ao"), remove: []string{"c"}},
		{name: "what waits for its update in place before what is up to date", replicas: 2, budget: surge, pool: pool("a:a", "b:ab", "c:a"), remove: []string{"b"}},
		{name: "what is updated before what serves", replicas: 2, budget: surge, pool: pool("a:a", "b:ab", "c:au"), remove: []string{"c"}},
		{name: "what still comes up before what serves", replicas: 2, budget: surge, pool: pool("a:a", "b:a", "c"), remove: []string{"c"}},
		{name: "a machine that never came up does not stay for ever", replicas: 1, budget: surge, pool: pool("a", "b:a"), remove: []string{"a"}},
		{name: "Oldest", replicas: 1, budget: surge, policy: infrav1.OldestDeletePolicy, pool: pool("b:a", "a:a", "c:a"), remove: []string{"b", "a"}},
		{name: "Oldest is the default", replicas: 2, budget: surge, pool: pool("b:a", "a:a", "c:a"), remove: []string{"b"}},
		{name: "Newest", replicas: 1, budget: surge, policy: infrav1.NewestDeletePolicy, pool: pool("b:a", "a:a", "c:a"), remove: []string{"c", "a"}},
		{name: "Random is the same each time", replicas: 2, budget: surge, policy: infrav1.RandomDeletePolicy, pool: pool("b:a", "a:a", "c:a"), remove: []string{"a"}},

		// Rolling update.
		{name: "surge: a new one first", replicas: 3, budget: surge, pool: pool("a:ao", "b:ao", "c:ao"), create: 1},
		{name: "surge: the old ones stay until the new one serves", replicas: 3, budget: surge, pool: pool("a:ao", "b:ao", "c:ao", "d")},
		{name: "surge: then one goes", replicas: 3, budget: surge, pool: pool("a:ao", "b:ao", "c:ao", "d:a"), remove: []string{"a"}, why: "1 outdated"},
		{name: "surge: and the next is made when it is gone", replicas: 3, budget: surge, pool: pool("a:l", "b:ao", "c:ao", "d:a")},
		{name: "surge: next", replicas: 3, budget: surge, pool: pool("b:ao", "c:ao", "d:a"), create: 1},
		{name: "surge: the last one goes", replicas: 3, budget: surge, pool: pool("c:ao", "d:a", "e:a", "f:a"), remove: []string{"c"}},
		{name: "surge of several", replicas: 3, budget: budget{maxSurge: 3}, pool: pool("a:ao", "b:ao", "c:ao"), create: 3},
		{name: "surge larger than the pool", replicas: 2, budget: budget{maxSurge: 9}, pool: pool("a:ao", "b:ao"), create: 2},
		{name: "unavailable: one goes first", replicas: 3, budget: inPlace, pool: pool("a:ao", "b:ao", "c:ao"), remove: []string{"a"}},
		{name: "unavailable: its replacement when it is gone", replicas: 3, budget: inPlace, pool: pool("b:ao", "c:ao"), create: 1},
		{name: "unavailable: no further one until that serves", replicas: 3, budget: inPlace, pool: pool("b:ao", "c:ao", "d")},
		{name: "both", replicas: 4, budget: budget{maxSurge: 1, maxUnavailable: 1}, pool: pool("a:ao", "b:ao", "c:ao", "d:ao"), remove: []string{"a"}, create: 1},
		{name: "outdated ones of no use go first, at no cost", replicas: 3, budget: inPlace, pool: pool("a:ao", "b:o", "c:ao"), remove: []string{"b"}},
		{name: "interrupted by another change: what had not come up is replaced at once", replicas: 3, budget: surge, pool: pool("a:ao", "b:ao", "c:ao", "d:o"), remove: []string{"d"}},
		{name: "blind: no Node is seen, nothing is replaced in one go", replicas: 3, budget: surge, pool: pool("a:o", "b:o", "c:o"), create: 1},
		{name: "blind, with the new one on its way", replicas: 3, budget: surge, pool: pool("a:o", "b:o", "c:o", "d")},
		{name: "an update in place takes the place of a replacement", replicas: 4, budget: inPlace, pool: pool("a:ao", "b:au", "c:a", "d:a")},
		{name: "a drain takes the place of a replacement", replicas: 4, budget: inPlace, pool: pool("a:ao", "b:ac", "c:a", "d:a")},
		{name: "a refused update holds no replacement back", replicas: 3, budget: surge, pool: pool("a:aw", "b:ao", "c:a", "d:a"), remove: []string{"b"}},
		{name: "a refused update of a drained machine does", replicas: 3, budget: surge, pool: pool("a:awc", "b:ao", "c:a", "d:a")},
		{name: "the old ones stay until the update in place has ended", replicas: 3, budget: surge, pool: pool("a:ao", "b:au", "c:a", "d:a")},
		{name: "update and scale up at once", replicas: 5, budget: surge, pool: pool("a:ao", "b:ao", "c:ao"), create: 3},
		{name: "update and scale down at once", replicas: 1, budget: surge, pool: pool("a:ao", "b:ao", "c:ao"), remove: []string{"a", "b"}, create: 0, why: "1 more than replicas, 1 outdated"},
		{name: "scaled down in the middle of an update", replicas: 2, budget: surge, pool: pool("a:ao", "b:ao", "c:ao", "d"), remove: []string{"a"}, why: "1 more than replicas"},
		{name: "back to zero in the middle of an update", replicas: 0, budget: surge, pool: pool("a:ao", "b:o", "c:a", "d"), remove: []string{"b", "a", "d", "c"}},
		{name: "no surge is left for an update while machines drain", replicas: 2, budget: surge, pool: pool("a:ao", "b:ao", "c:l", "d:l")},

		// Machines that cannot be created.
		{name: "frozen: nothing is made and nothing replaced", replicas: 3, budget: surge, frozen: true, pool: pool("a:ao", "b:r")},
		{name: "frozen: it may shrink", replicas: 1, budget: surge, frozen: true, pool: pool("a:ao", "b:ao", "c:ao"), remove: []string{"a", "b"}},

		// Remediation.
		{name: "remediated: deleted and replaced", replicas: 3, budget: surge, pool: pool("a:a", "b:r", "c:a"), remove: []string{"b"}, create: 1, why: "1 unhealthy"},
		{name: "remediated: one at a time", replicas: 3, budget: surge, pool: pool("a:r", "b:r", "c:a"), remove: []string{"a"}, create: 1},
		{name: "remediated: the next when the replacement serves", replicas: 3, budget: surge, pool: pool("b:r", "c:a", "d")},
		{name: "remediated: two at a time", replicas: 3, budget: budget{maxSurge: 1, maxUnavailable: 1}, pool: pool("a:r", "b:r", "c:r"), remove: []string{"a", "b"}, create: 1, why: "2 unhealthy"},
		{name: "remediated: an update in place delays nothing", replicas: 3, budget: surge, pool: pool("a:r", "b:u", "c:a"), remove: []string{"a"}, create: 1},
		{name: "remediated: not during its update in place", replicas: 3, budget: surge, pool: pool("a:a", "b:rt", "c:a")},
		{name: "remediated: although its host does not end its update in place", replicas: 3, budget: surge, pool: pool("a:a", "b:ru", "c:a"), remove: []string{"b"}, create: 1},
		{name: "remediated and one too many", replicas: 2, budget: surge, pool: pool("a:r", "b:a", "c:a"), remove: []string{"a"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.open == nil {
				tc.open = tc.domains
			}
			want := desired{replicas: tc.replicas, budget: tc.budget, frozen: tc.frozen, policy: tc.policy, domains: tc.domains, open: tc.open}
			got := makePlan(want, tc.pool)
			if len(got.create) != tc.create || tc.in != nil && !slices.Equal(got.create, tc.in) {
				t.Errorf("create %d in %q, want %d in %q", len(got.create), got.create, tc.create, tc.in)
			}
			if !slices.Equal(got.remove, tc.remove) {
				t.Errorf("remove %q, want %q", got.remove, tc.remove)
			}
			if why := got.causes.String(); tc.why != "" && why != tc.why || len(got.remove) != got.causes.surplus+got.causes.outdated+got.causes.unhealthy {
				t.Errorf("causes of %d deletions: %q, want %q", len(got.remove), why, tc.why)
			}
		})
	}
}

// TestPlanHistories runs pools through random histories: the spec changes, machines start, fail, drain, disappear, are marked, updated
// and remediated, and the controller is killed while it carries out a plan. The disruption budget is kept at each step. After the
// last event, every history ends with exactly the desired machines.
func TestPlanHistories(t *testing.T) {
	histories := 3000
	if testing.Short() {
		histories = 300
	}
	for seed := range histories {
		w := &world{t: t, seed: seed, r: rand.New(rand.NewPCG(uint64(seed), 4))}
		w.changeSpec()
		for range 60 {
			w.disturb()
			w.act(w.r.IntN(3) == 0)
			if t.Failed() {
				return
			}
		}
		w.settle()
		if t.Failed() {
			return
		}
	}
}

// world is a pool and its random events.
type world struct {
	t    *testing.T
	seed int
	r    *rand.Rand

	want       desired
	generation int
	pool       []*unit
	made       int
}

type unit struct {
	instance
	generation int
}

func (w *world) fatalf(p plan, format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("history %d: %s\nwant %+v\npool %s\nplan %+v", w.seed, fmt.Sprintf(format, args...), w.want, w.dump(), p)
}

func (w *world) dump() string {
	var b strings.Builder
	for _, i := range w.observe() {
		fmt.Fprintf(&b, "\n  %+v", i)
	}
	return b.String()
}

func (w *world) changeSpec() {
	switch w.r.IntN(4) {
	case 0:
		w.generation++
	case 1:
		w.want.budget = []budget{{1, 0}, {0, 1}, {2, 1}, {0, 3}, {5, 0}, {1, 9}}[w.r.IntN(6)]
	case 2:
		w.want.policy = []infrav1.DeletePolicy{"", infrav1.OldestDeletePolicy, infrav1.NewestDeletePolicy, infrav1.RandomDeletePolicy}[w.r.IntN(4)]
		w.want.domains = [][]string{nil, {"x", "y"}, {"x", "y", "z"}}[w.r.IntN(3)]
		w.want.open = w.want.domains[w.r.IntN(max(1, len(w.want.domains))):]
	default:
		w.want.replicas = w.r.IntN(8)
	}
	if w.want.budget == (budget{}) {
		w.want.budget = budget{maxSurge: 1}
	}
}

// disturb causes a random event.
func (w *world) disturb() {
	if w.r.IntN(5) == 0 {
		w.changeSpec()
	}
	for _, m := range slices.Clone(w.pool) {
		switch w.r.IntN(14) {
		case 0, 1, 2, 3:
			w.comeUp(m)
		case 4:
			m.available = false
		case 5:
			m.failed = w.r.IntN(3) == 0
		case 6:
			m.remediate = m.remediate || !m.available && w.r.IntN(2) == 0
		case 7:
			m.marked = w.r.IntN(3) == 0
		case 8:
			m.leaving = m.leaving || w.r.IntN(4) == 0 // deleted by a user
		case 11:
			begun, refused := w.r.IntN(2) == 0, w.r.IntN(2) == 0
			m.update = updateState{begun: begun, current: begun, refused: begun && refused, attended: begun && !refused && w.r.IntN(2) == 0, drained: w.r.IntN(4) == 0}
		case 9, 10:
			if m.leaving || w.r.IntN(20) == 0 { // drained; or lost with its object
				w.gone(m)
			}
		}
	}
}

func (w *world) comeUp(m *unit) { m.available = !m.failed && !m.remediate }

func (w *world) gone(m *unit) {
	w.pool = slices.DeleteFunc(w.pool, func(o *unit) bool { return o == m })
}

// observe returns the state of the pool for the controller, in random order.
func (w *world) observe() []instance {
	var out []instance
	for _, m := range w.pool {
		i := m.instance
		i.outdated = !m.update.busy() && (m.generation != w.generation || len(w.want.domains) > 0 && !slices.Contains(w.want.domains, m.domain))
		i.behind = i.outdated || m.update.busy()
		out = append(out, i)
	}
	w.r.Shuffle(len(out), func(a, b int) { out[a], out[b] = out[b], out[a] })
	return out
}

// act makes a plan, checks it, and carries it out, or only a part of it if the controller is killed.
func (w *world) act(killed bool) plan {
	p := makePlan(w.want, w.observe())
	w.check(p)
	again := makePlan(w.want, w.observe())
	if !slices.Equal(p.create, again.create) || !slices.Equal(p.remove, again.remove) {
		w.fatalf(p, "another plan for the same pool: %+v", again)
	}
	removals, creations := len(p.remove), len(p.create)
	if killed {
		removals, creations = w.r.IntN(removals+1), w.r.IntN(creations+1)
	}
	for _, m := range w.pool {
		m.leaving = m.leaving || slices.Contains(p.remove[:removals], m.name)
	}
	for _, domain := range p.create[:creations] {
		w.made++
		w.pool = append(w.pool, &unit{
			instance:   instance{name: fmt.Sprint("m", w.made), created: epoch.Add(time.Duration(w.made) * time.Second), domain: domain},
			generation: w.generation,
		})
	}
	return p
}

// check compares a plan with the guarantees of makePlan.
func (w *world) check(p plan) {
	var active, after, spared, plain int
	for _, i := range w.observe() {
		i.available = i.available && !i.unhealthy() && !i.interrupted()
		removed := slices.Contains(p.remove, i.name)
		if i.leaving {
			if removed {
				w.fatalf(p, "%s leaves already", i.name)
			}
			continue
		}
		active++
		switch {
		case !removed && i.available:
			after++
		case removed && i.available && !i.marked:
			spared++
		}
		if removed && !i.outdated && (!i.remediate || i.update.attended) {
			plain++
		}
	}
	if least := max(0, w.want.replicas-w.want.budget.maxUnavailable); spared > 0 && after < least {
		w.fatalf(p, "%d machines stay available, %d must", after, least)
	}
	if excess := max(0, active-w.want.replicas); plain > excess {
		w.fatalf(p, "%d machines that are as they should be are deleted, %d are too many", plain, excess)
	}
	if total := len(w.pool) + len(p.create); len(p.create) > 0 && total > w.want.replicas+w.want.budget.maxSurge {
		w.fatalf(p, "%d machines, %d + %d may be", total, w.want.replicas, w.want.budget.maxSurge)
	}
	for _, domain := range p.create {
		if (len(w.want.domains) == 0) != (domain == "") || domain != "" && !slices.Contains(w.want.open, domain) {
			w.fatalf(p, "a machine in failure domain %q", domain)
		}
	}
}

// settle ends the random events: machines start, deletions and updates complete, and a MachineHealthCheck marks failed machines. The controller
// is still killed sometimes.
func (w *world) settle() {
	for step := range 1000 {
		p := w.act(step < 20 && w.r.IntN(3) == 0)
		done := p.empty()
		for _, m := range slices.Clone(w.pool) {
			switch {
			case m.leaving:
				w.gone(m)
			case m.interrupted():
				m.update = updateState{}
			case m.failed:
				m.remediate = true
			case !m.available && !m.remediate && w.r.IntN(3) == 0:
				w.comeUp(m)
			case m.available:
				continue
			}
			done = false
		}
		if done {
			break
		}
	}
	for _, i := range w.observe() {
		if i.leaving || i.outdated || !i.available {
			w.fatalf(plan{}, "it does not end: %+v", i)
		}
	}
	if len(w.pool) != w.want.replicas {
		w.fatalf(plan{}, "it ends with %d machines", len(w.pool))
	}
}

// TestPlanIsQuick: a plan for thousands of machines must not block the manager.
func TestPlanIsQuick(t *testing.T) {
	const n = 10000
	var all []instance
	for i := range n {
		all = append(all, instance{name: fmt.Sprint("m", i), created: epoch, available: true, domain: fmt.Sprint(i % 3)})
	}
	start := time.Now()
	if p := makePlan(desired{budget: budget{maxSurge: 1}}, all); len(p.remove) != n {
		t.Errorf("%d removed", len(p.remove))
	}
	if p := makePlan(desired{replicas: n, budget: budget{maxSurge: 1}, open: []string{"0", "1", "2"}}, nil); len(p.create) != n {
		t.Errorf("%d created", len(p.create))
	}
	if took := time.Since(start); took > time.Minute {
		t.Errorf("it took %s", took)
	}
}

// A machine is stuck if its removal has failed for some time. A restart of a manager or of its host is not sufficient.
func TestStuckIn(t *testing.T) {
	for _, tc := range []struct {
		name   string
		since  time.Duration
		reason string
		want   time.Duration
	}{
		{"not being deleted", 0, "", -1},
		{"being removed", time.Hour, clusterv1.DeletingReason, -1},
		{"its host does not answer", 10 * time.Second, infrav1.DeletionBlockedReason, stuckAfter - 10*time.Second},
		{"its host has not answered for long", time.Hour, infrav1.DeletionBlockedReason, 0},
	} {
		m := &infrav1.CapstanMachine{}
		if tc.since > 0 {
			m.DeletionTimestamp = &metav1.Time{Time: epoch.Add(-tc.since)}
			conditions.Set(m, metav1.Condition{Type: clusterv1.DeletingCondition, Status: metav1.ConditionTrue, Reason: tc.reason})
		}
		if got := stuckIn(m, epoch); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}
