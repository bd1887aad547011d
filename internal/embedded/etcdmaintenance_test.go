package embedded

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"capstan.dev/capstan/internal/testenv/expect"
)

// The plane's etcd runs out of space. The plane reports the alarm and frees space, and etcd accepts writes again.
func TestEtcdOutOfSpace(t *testing.T) {
	p := newPlain(t)
	p.etcd.Stop()
	p.etcdArgs = []string{"--quota-backend-bytes=" + strconv.Itoa(8<<20)}
	p.start()
	full := false
	p.do(func(ctx context.Context, c *clientv3.Client) {
		for range 1000 { // All revisions are of one key, so all but the last one can be compacted.
			if _, err := c.Put(ctx, "/registry/a", strings.Repeat("x", 256<<10)); errors.Is(err, rpctypes.ErrNoSpace) {
				full = true
				return
			} else if err != nil {
				t.Fatal(err)
			}
		}
	})
	if !full {
		t.Fatal("etcd is not full: the test proves nothing")
	}
	d := &plane{layout: p.layout, state: p.state, board: newBoard(Status{Components: []ProcessStatus{{Name: etcdName}}})}
	ctx, cancel := context.WithTimeout(t.Context(), expect.Patience)
	defer cancel()
	done := make(chan struct{})
	go func() { d.care(ctx); close(done) }()
	if !d.board.await(ctx, func(s Status) bool { return s.EtcdAlarms == "NOSPACE" }) {
		t.Fatal("the alarm is not shown")
	}
	if !d.board.await(ctx, func(s Status) bool { return s.EtcdAlarms == "" }) {
		t.Fatal("the alarm is not cleared")
	}
	p.put("/registry/a", "small")
	if value := p.get("/registry/a"); value != "small" {
		t.Errorf("etcd has %.10q", value)
	}
	cancel()
	<-done
}
