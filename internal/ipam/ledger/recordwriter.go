package ledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// ErrPoolGone means that the pool object does not exist.
var ErrPoolGone = errors.New("the pool does not exist")

// writeTimeout bounds a write of the record.
const writeTimeout = 15 * time.Second

// conflicts is the number of attempts of a batch before its claims back off.
const conflicts = 10

// writes numbers the writes of this process, for all pools.
var writes atomic.Uint64

// request is one change for the next write.
type request struct {
	// apply changes the state and reports whether the change must be written. It is called again, after undo, when the
	// write fails.
	apply func(*state) bool
	undo  func(*state)
	err   error
	done  chan struct{}
	// claims is the number of claims that the request serves, for metrics.
	claims int
}

// recordWriter takes over and writes the record of one pool. Concurrent requests share a write. At most one goroutine at
// a time reads and writes the record.
type recordWriter struct {
	client client.Client
	live   client.Reader
	// lister reads all IPAddresses that can reference the pool.
	lister *lister
	holder string
	opts   *Options
	key    Key

	// mu is the lock of the pool. It guards the state and the fields below.
	mu    *sync.Mutex
	state *state
	// held is true if the resourceVersion of the state's object comes from our own write, or from a read that showed our
	// own last write. All used addresses are then in the state.
	held bool
	// refresh is true if the pool object has changed since the last read.
	refresh bool
	// write is the number of our last write.
	write    string
	requests []*request
	flushing bool
}

func newRecordWriter(r *Registry, mu *sync.Mutex, s *state) *recordWriter {
	lister := r.global
	if s.key.Namespace != "" {
		lister = r.namespaced
	}
	return &recordWriter{
		client: r.client, live: r.live, lister: lister, holder: r.holder, opts: &r.opts, key: s.key,
		mu: mu, state: s,
	}
}

// submit adds a request to the next write and waits for it.
func (w *recordWriter) submit(ctx context.Context, r *request) error {
	r.done = make(chan struct{})
	w.mu.Lock()
	w.requests = append(w.requests, r)
	if !w.flushing {
		w.flushing = true
		go w.flush(context.WithoutCancel(ctx))
	}
	w.mu.Unlock()
	// The write has a time limit. To cancel it earlier would leave an allocated address without a claim.
	<-r.done
	return r.err
}

func (w *recordWriter) flush(ctx context.Context) {
	for {
		w.mu.Lock()
		batch := w.requests
		if len(batch) == 0 {
			w.flushing = false
			w.mu.Unlock()
			return
		}
		n := min(len(batch), w.opts.MaxBatch)
		w.requests = batch[n:]
		w.mu.Unlock()

		err := w.survive(ctx, batch[:n])
		for _, r := range batch[:n] {
			r.err = err
			close(r.done)
		}
	}
}

// survive processes a batch. Tenants write the specs of pools, and all pools share this process. A panic therefore
// becomes the error of its batch. The state may be inconsistent after a panic, so it is read from the record again.
func (w *recordWriter) survive(ctx context.Context, batch []*request) (err error) {
	defer func() {
		if bug := recover(); bug != nil {
			err = fmt.Errorf("%s cannot be processed because of an error in Capstan: %v: report it with the pool's spec, and use another pool meanwhile", w.key, bug)
			log.FromContext(ctx).Error(err, "Recovered", "stack", string(debug.Stack()))
			w.mu.Lock()
			w.forgetDoc()
			w.mu.Unlock()
		}
	}()
	return w.process(ctx, batch)
}

// process applies a batch and writes the record. It repeats both after a conflict with another write.
func (w *recordWriter) process(ctx context.Context, batch []*request) error {
	for attempt := range conflicts {
		if err := w.hold(ctx); err != nil {
			return err
		}
		doc, claims, held := w.apply(batch)
		if !held {
			continue
		}
		if doc == nil {
			return nil
		}
		err := w.blockMove(ctx, doc)
		if err == nil {
			err = w.put(ctx, doc)
		}
		w.written(doc, batch, err)
		if err == nil {
			w.opts.Observe("write", w.key, claims)
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return fmt.Errorf("writing the record of %s: %w", w.key, err)
		}
		w.opts.Observe("conflict", w.key, 0)
		giveWay(attempt)
	}
	return fmt.Errorf("writing the record of %s: other writes came between %d times", w.key, conflicts)
}

// written adopts the written object, or reverts the batch after a failed write.
func (w *recordWriter) written(doc ipamv1.Pool, batch []*request, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.state.doc = doc
		w.write = doc.PoolStatus().Allocator.Write
		return
	}
	for _, r := range slices.Backward(batch) {
		r.undo(w.state)
	}
	w.held = false
}

// giveWay waits for a random time that grows with the attempts. Two processes that need the same record would otherwise
// take it from each other before either has used it.
func giveWay(attempt int) {
	time.Sleep(rand.N(20 * time.Millisecond << min(attempt, 6))) // not for secrets.
}

// apply applies a batch, if the record is still held, and returns the object to write, or nil.
func (w *recordWriter) apply(batch []*request) (doc ipamv1.Pool, claims int, held bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.held || w.refresh {
		return nil, 0, false
	}
	w.state.tick()
	must := false
	for _, r := range batch {
		if r.apply(w.state) {
			must = true
			claims += r.claims
		}
	}
	if !must {
		return nil, 0, true
	}
	doc = w.state.doc.DeepCopyObject().(ipamv1.Pool) //nolint:forcetypeassert // a copy has the type of the original.
	w.state.fill(doc, w.holder)
	return doc, claims, true
}

func (w *recordWriter) put(ctx context.Context, doc ipamv1.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return w.client.Status().Update(ctx, doc)
}

// hold makes sure that this process holds the record and that the state contains all used addresses.
func (w *recordWriter) hold(ctx context.Context) error {
	w.mu.Lock()
	ready := w.held && !w.refresh
	w.mu.Unlock()
	if ready {
		return nil
	}
	for attempt := range conflicts {
		doc, err := w.read(ctx)
		if err != nil {
			return err
		}
		if w.stillOurs(doc) {
			return nil
		}
		switch err := w.takeOver(ctx, doc); {
		case err == nil:
			return nil
		case !apierrors.IsConflict(err):
			return fmt.Errorf("taking over the record of %s: %w", w.key, err)
		}
		w.opts.Observe("conflict", w.key, 0)
		giveWay(attempt)
	}
	return fmt.Errorf("taking over the record of %s: other writes came between %d times", w.key, conflicts)
}

func (w *recordWriter) read(ctx context.Context) (ipamv1.Pool, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	doc := NewObject(w.key.Kind)
	err := w.live.Get(ctx, client.ObjectKey{Namespace: w.key.Namespace, Name: w.key.Name}, doc)
	if apierrors.IsNotFound(err) {
		w.mu.Lock()
		w.forgetDoc()
		w.mu.Unlock()
		return nil, fmt.Errorf("%s: %w", w.key, ErrPoolGone)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", w.key, err)
	}
	return doc, nil
}

// forgetDoc forgets the pool object, for example after its deletion.
func (w *recordWriter) forgetDoc() {
	w.state.forgetDoc()
	w.held, w.refresh = false, false
}

// NewObject returns an empty pool of a kind.
func NewObject(kind string) ipamv1.Pool {
	if kind == ipamv1.GlobalCapstanIPPoolKind {
		return &ipamv1.GlobalCapstanIPPool{}
	}
	return &ipamv1.CapstanIPPool{}
}

// stillOurs reports whether the record is unchanged since our last write. If so, it adopts the changes of the rest of the
// object.
func (w *recordWriter) stillOurs(doc ipamv1.Pool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	record := doc.PoolStatus().Allocator
	if w.state.doc == nil || w.state.doc.GetUID() != doc.GetUID() || record == nil ||
		w.write == "" || record.Holder != w.holder || record.Write != w.write {
		return false
	}
	w.state.adopt(doc, false)
	w.held, w.refresh = true, false
	return true
}

// takeOver writes our name into the record and then reads all addresses. The order matters: the read contains all
// allocations of the previous holder, and the previous holder cannot add any. The watch starts before the read, because
// the deletion of an address after the read would otherwise be missed.
func (w *recordWriter) takeOver(ctx context.Context, doc ipamv1.Pool) error {
	if w.key.Namespace == "" {
		if err := w.opts.FollowAll(ctx); err != nil {
			return err
		}
	}
	status := doc.PoolStatus()
	if status.Allocator == nil {
		status.Allocator = &ipamv1.AllocatorStatus{Resting: moved(doc, w.state.now())}
	}
	sign(status.Allocator, w.holder)
	if err := w.put(ctx, doc); err != nil {
		return err
	}
	w.mu.Lock()
	known := slices.Collect(maps.Keys(w.state.addresses.byUID))
	w.mu.Unlock()
	items, err := w.lister.list(ctx, w.key)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state.compare(known, items)
	w.state.adopt(doc, true)
	w.held, w.refresh = true, false
	w.write = status.Allocator.Write
	w.opts.Observe("takeover", w.key, 0)
	return nil
}
