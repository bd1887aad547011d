// Package dashboard serves a web page with the objects that a user can read in a management cluster: hosts, clusters, machines,
// pools, their waits, and events. The page changes with the objects and changes nothing itself.
//
// The objects come from tenants, so all their texts are untrusted. The package keeps a bounded number of objects, of each only the
// fields that the page shows, and the page inserts every text as text.
//
// Layer: tool. Allowed imports: api, library, contract, host, node.
package dashboard

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

const (
	// minPause between two computations of the page joins changes that come together.
	minPause = 250 * time.Millisecond
	// maxShare is the part of one processor that a page of many objects uses: one in maxShare.
	maxShare = 5
	// refresh is the pause after which the page is computed without a change, because some states depend on the time.
	refresh = 30 * time.Second
	// shutdown limits the time that running requests get when the command ends.
	shutdown = 2 * time.Second
)

// Options of Run.
type Options struct {
	// Config and Mapper are those of the user.
	Config *rest.Config
	Mapper apimeta.RESTMapper
	// Namespace restricts the page. Empty: all namespaces.
	Namespace string
	// Fallback is the namespace of the context. It is read for kinds that the user cannot list in all namespaces.
	Fallback string
	// Port on loopback. 0: a free one.
	Port int
	// Ready is called with the address of the page.
	Ready func(url string) error
}

// Run serves the page on loopback until the context ends.
func Run(ctx context.Context, o Options) error {
	dyn, err := dynamic.NewForConfig(o.Config)
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(o.Port)))
	if err != nil {
		return fmt.Errorf("expected to serve the page on loopback, port %d; choose another --port: %w", o.Port, err)
	}
	s := newServer(listener.Addr().(*net.TCPAddr).Port)
	r := newReader(dyn, o.Mapper, o.Namespace, o.Fallback)
	group, ctx := errgroup.WithContext(ctx)
	web := s.http(ctx)
	group.Go(func() error {
		if err := web.Serve(listener); err != http.ErrServerClosed {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		deadline, cancel := context.WithTimeout(context.Background(), shutdown)
		defer cancel()
		if web.Shutdown(deadline) != nil {
			return web.Close()
		}
		return nil
	})
	for _, k := range kinds {
		group.Go(func() error { r.follow(ctx, k); return nil })
	}
	group.Go(func() error { return s.update(ctx, r, o) })
	group.Go(func() error { return o.Ready(s.url()) })
	return group.Wait()
}

// update computes the page after changes of objects until the context ends.
func (s *server) update(ctx context.Context, r *reader, o Options) error {
	ticker := time.NewTicker(refresh)
	defer ticker.Stop()
	for {
		start := time.Now()
		sections, err := marshal(Build(r.snapshot(), start), o)
		if err != nil {
			return err
		}
		s.publish(sections)
		if !pause(ctx, max(minPause, maxShare*time.Since(start))) {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-r.changed:
		case <-ticker.C:
		}
	}
}

// pause reports false if the context ends before.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// marshal returns the sections of the page. The browser gets only those that changed.
func marshal(m Model, o Options) (map[string][]byte, error) {
	out := map[string][]byte{}
	for name, section := range map[string]any{
		"source":  map[string]string{"server": o.Config.Host, "namespace": o.Namespace},
		"summary": m.Summary, "waiting": m.Operations, "updates": m.Updates, "hosts": m.Hosts, "clusters": m.Clusters,
		"pools": m.Pools, "events": m.Events, "access": m.Access,
	} {
		data, err := json.Marshal(section)
		if err != nil {
			return nil, err
		}
		out[name] = data
	}
	return out, nil
}
