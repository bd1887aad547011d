package integration

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam/ledger"
	"capstan.dev/capstan/internal/testenv/expect"
)

// moment is a write of an object. The API server numbers the writes of all kinds in one sequence, so the moments of an
// IPAddress and of a claim can be compared. The zero moment has not happened.
type moment struct {
	version uint64
	at      time.Time // when the test received it, for people
}

func momentOf(obj metav1.Object) moment {
	version, err := strconv.ParseUint(obj.GetResourceVersion(), 10, 64)
	if err != nil {
		panic(err)
	}
	return moment{version, time.Now()}
}

// mark sets a moment that has not happened before.
func (m *moment) mark(happened bool, now moment) {
	if happened && m.version == 0 {
		*m = now
	}
}

func (m moment) String() string {
	if m.version == 0 {
		return "never"
	}
	return fmt.Sprintf("%d (%s)", m.version, m.at.Format("15:04:05.000"))
}

// window is the time from a moment to a later one. The end may not have happened.
type window struct{ from, to moment }

// windowOf returns the window from the latest start to the earliest end that has happened. A start that has not happened makes
// the window empty.
func windowOf(starts, ends []moment) (w window, ok bool) {
	for _, m := range starts {
		if m.version == 0 {
			return window{}, false
		}
		if m.version > w.from.version {
			w.from = m
		}
	}
	for _, m := range ends {
		if m.version != 0 && (w.to.version == 0 || m.version < w.to.version) {
			w.to = m
		}
	}
	return w, w.to.version == 0 || w.from.version < w.to.version
}

func (w window) overlaps(other window) bool {
	_, both := windowOf([]moment{w.from, other.from}, []moment{w.to, other.to})
	return both
}

// life is the history of an IPAddress or a claim.
type life struct {
	name types.NamespacedName
	uid  types.UID
	// created is the first write, deleting the first one with a deletion time, and gone the last write.
	created, deleting, gone moment

	pool    ledger.Key
	address string    // of an IPAddress
	owner   types.UID // of an IPAddress: its claim
	refers  moment    // of a claim: the first write of status.addressRef
}

func (l *life) String() string {
	return fmt.Sprintf("%s (%s): created at %v, deletion requested at %v, removed at %v", l.name, l.uid, l.created, l.deleting, l.gone)
}

// witness records the lives of all IPAddresses of Capstan's pools and of all claims.
type witness struct {
	// alarm is called for two IPAddresses that are served at the same time, as soon as they are.
	alarm func(text string)

	mu                sync.Mutex
	addresses, claims map[types.UID]*life
}

func newWitness() *witness {
	return &witness{alarm: func(string) {}, addresses: map[types.UID]*life{}, claims: map[types.UID]*life{}}
}

// startWitness starts watches past all caches, in the order of the API server's writes.
func startWitness(t *testing.T) *witness {
	t.Helper()
	w := newWitness()
	w.alarm = func(text string) { t.Error(text) }
	follow(t, &capiipamv1.IPAddressList{}, w.note)
	follow(t, &capiipamv1.IPAddressClaimList{}, w.note)
	return w
}

// note records an event.
func (w *witness) note(kind watch.EventType, obj runtime.Object) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch o := obj.(type) {
	case *capiipamv1.IPAddress:
		l := lifeOf(w.addresses, kind, o, o.Spec.PoolRef)
		l.address = o.Spec.Address
		if owner := metav1.GetControllerOf(o); owner != nil {
			l.owner = owner.UID
		}
		if kind == watch.Added {
			w.check(l)
		}
	case *capiipamv1.IPAddressClaim:
		l := lifeOf(w.claims, kind, o, o.Spec.PoolRef)
		if o.Status.AddressRef.Name == "" || l.refers.version != 0 {
			return
		}
		l.refers = momentOf(o)
		for _, ip := range w.addresses {
			if ip.owner == l.uid {
				w.check(ip)
			}
		}
	}
}

// check raises the alarm if an IPAddress and another one are served at the same time.
func (w *witness) check(ip *life) {
	for _, other := range w.addresses {
		if other != ip && other.pool == ip.pool && other.address == ip.address && w.compare(other, ip) == bothServed {
			w.alarm(w.describe(duplicate{bothServed, other, ip}))
		}
	}
}

func lifeOf(lives map[types.UID]*life, kind watch.EventType, o client.Object, ref capiipamv1.IPPoolReference) *life {
	l, ok := lives[o.GetUID()]
	if !ok {
		pool, _ := ledger.KeyOf(ref, o.GetNamespace())
		l = &life{name: client.ObjectKeyFromObject(o), uid: o.GetUID(), pool: pool}
		lives[l.uid] = l
	}
	now := momentOf(o)
	l.created.mark(true, now)
	l.deleting.mark(!o.GetDeletionTimestamp().IsZero(), now)
	l.gone.mark(kind == watch.Deleted, now)
	return l
}

// served returns the window in which a claim serves an IPAddress: the claim's status refers to it, and neither is being
// deleted.
func (w *witness) served(ip *life) (window, bool) {
	claim, ok := w.claims[ip.owner]
	if !ok {
		return window{}, false
	}
	return windowOf([]moment{ip.created, claim.refers}, []moment{ip.deleting, ip.gone, claim.deleting, claim.gone})
}

// late reports whether an IPAddress was created after its claim was deleted, or never had a claim. Only a request that
// outlived its deadline does this. The IPAddress serves no claim, and the provider removes it.
func (w *witness) late(ip *life) bool {
	claim, ok := w.claims[ip.owner]
	if !ok {
		return true
	}
	alive, _ := windowOf([]moment{claim.created}, []moment{claim.deleting, claim.gone})
	return alive.to.version != 0 && alive.to.version < ip.created.version
}

// verdict is the weight of a pair of IPAddresses with the same address.
type verdict string

const (
	bothServed verdict = "both were served at the same time"
	// bothExisted means that the address was chosen again too early, although no two claims had it at the same time.
	bothExisted verdict = "both existed, and were served at different times or not at all"
	// oneLate is permitted: the API server can execute a request at any time after its deadline, and no check on the side
	// of the client prevents this. No claim ever refers to such an IPAddress.
	oneLate verdict = "both existed, but one was created after its claim was deleted and was never served"
)

type duplicate struct {
	verdict
	a, b *life
}

// duplicates returns the pairs of IPAddresses that existed at the same time with the same address of a pool.
func (w *witness) duplicates() []duplicate {
	w.mu.Lock()
	defer w.mu.Unlock()
	byAddress := map[string][]*life{}
	for _, ip := range w.addresses {
		if key := ip.pool.String() + " " + ip.address; ip.pool.Kind != "" { // Other providers' pools have no kind here.
			byAddress[key] = append(byAddress[key], ip)
		}
	}
	var out []duplicate
	for _, address := range slices.Sorted(maps.Keys(byAddress)) {
		lives := byAddress[address]
		slices.SortFunc(lives, func(a, b *life) int { return int(a.created.version) - int(b.created.version) })
		for i, a := range lives {
			for _, b := range lives[i+1:] {
				if v := w.compare(a, b); v != "" {
					out = append(out, duplicate{v, a, b})
				}
			}
		}
	}
	return out
}

// compare returns the verdict about two IPAddresses with the same address, or nothing.
func (w *witness) compare(a, b *life) verdict {
	if !(window{a.created, a.gone}).overlaps(window{b.created, b.gone}) {
		return ""
	}
	ofA, servedA := w.served(a)
	ofB, servedB := w.served(b)
	switch {
	case servedA && servedB && ofA.overlaps(ofB):
		return bothServed
	case !servedA && w.late(a), !servedB && w.late(b):
		return oneLate
	}
	return bothExisted
}

// describe returns the history of both IPAddresses and of their claims. The caller holds the lock.
func (w *witness) describe(d duplicate) string {
	text := fmt.Sprintf("two IPAddresses of %s have %s: %s", d.a.pool, d.a.address, d.verdict)
	for _, ip := range []*life{d.a, d.b} {
		text += "\n  IPAddress " + ip.String()
		if claim, ok := w.claims[ip.owner]; ok {
			text += fmt.Sprintf("\n    of claim %v, addressRef written at %v", claim, claim.refers)
		} else {
			text += fmt.Sprintf("\n    of claim %q, which the test has never seen", ip.owner)
		}
	}
	return text
}

// report fails the test if an address was allocated twice.
func (w *witness) report(t *testing.T) {
	t.Helper()
	duplicates := w.duplicates()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range duplicates {
		if d.verdict == oneLate {
			t.Log(w.describe(d))
		} else {
			t.Error(w.describe(d))
		}
	}
}

// finish waits for the last events of some pools, whose claims were removed, before it reports. It returns the number of
// their IPAddresses.
func (w *witness) finish(t *testing.T, pools ...ipamv1.Pool) (seen int) {
	t.Helper()
	expect.Eventually(t, "the watches to show the removal of all claims and IPAddresses", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		seen = 0
		for _, p := range pools {
			ips, err := allGone(w.addresses, p)
			if err != nil {
				return err
			}
			if _, err := allGone(w.claims, p); err != nil {
				return err
			}
			seen += ips
		}
		return nil
	})
	w.report(t)
	return seen
}

// allGone returns the number of objects of a pool, or an error if one of them exists.
func allGone(lives map[types.UID]*life, p ipamv1.Pool) (n int, err error) {
	for _, l := range lives {
		if l.pool != ledger.KeyOfPool(p) {
			continue
		}
		if n++; l.gone.version == 0 {
			return n, fmt.Errorf("%v", l)
		}
	}
	return n, nil
}

// A sequence of writes leads to the right verdict. Each word is one write, in order: + creates, - requests the deletion,
// ! removes; A and B are IPAddresses with the same address, a and b their claims; = writes the claim's status.
func TestWitness(t *testing.T) {
	tests := map[string]struct {
		writes string
		want   verdict
	}{
		"one after the other":                      {"+a +A =a -a !A !a +b +B =b -b !B !b", ""},
		"the next one before the claim is removed": {"+a +A =a -a !A +b +B =b !a -b !B !b", ""},
		"both served":                              {"+a +A =a +b +B =b -a !A !a -b !B !b", bothServed},
		"both served, never removed":               {"+a +A +b +B =b =a", bothServed},
		"the first one was being released":         {"+a +A =a -a +b +B =b !A !a -b !B !b", bothExisted},
		"the first one was being deleted":          {"+a +A =a -A +b +B =b !A !a", bothExisted},
		"the second one was never served":          {"+a +A =a +b +B -b !B !b -a !A !a", bothExisted},
		"late, while its claim is being deleted":   {"+a +b -b +A =a +B !B !b", oneLate},
		"late, after its claim":                    {"+b +a =b -b !b +A =a +B !B", oneLate},
		"late, and the first one in time":          {"+b -b !b +B +a +A =a !B", oneLate},
		"of a claim that never existed":            {"+a +A =a +B !B", oneLate},
	}
	for name, tt := range tests {
		w := newWitness()
		objects := map[byte]client.Object{}
		for i, word := range strings.Fields(tt.writes) {
			w.note(play(objects, word, i+1))
		}
		var got verdict
		for _, d := range w.duplicates() {
			got = d.verdict
		}
		if got != tt.want {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
}

// play executes one write and returns its event.
func play(objects map[byte]client.Object, word string, version int) (watch.EventType, runtime.Object) {
	id := word[1]
	o, ok := objects[id]
	switch lower := strings.ToLower(string(id)); {
	case ok:
	case string(id) == lower:
		o = &capiipamv1.IPAddressClaim{ObjectMeta: metav1.ObjectMeta{Name: lower, UID: types.UID(lower)}}
	default:
		yes := true
		o = &capiipamv1.IPAddress{
			ObjectMeta: metav1.ObjectMeta{
				Name: lower, UID: types.UID(string(id)),
				OwnerReferences: []metav1.OwnerReference{{UID: types.UID(lower), Controller: &yes}},
			},
			Spec: capiipamv1.IPAddressSpec{
				Address: "10.0.0.1",
				PoolRef: capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: ipamv1.CapstanIPPoolKind, Name: "pool"},
			},
		}
	}
	objects[id] = o
	o.SetResourceVersion(strconv.Itoa(version))
	switch word[0] {
	case '+':
		return watch.Added, o
	case '!':
		return watch.Deleted, o
	case '-':
		o.SetDeletionTimestamp(&metav1.Time{Time: time.Now()})
	case '=':
		o.(*capiipamv1.IPAddressClaim).Status.AddressRef.Name = o.GetName() //nolint:forcetypeassert // only claims have a status.
	}
	return watch.Modified, o
}
