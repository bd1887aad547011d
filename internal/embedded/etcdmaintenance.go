package embedded

import (
	"context"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	etcdcare "capstan.dev/capstan/internal/node/etcd"
)

// care maintains the plane's etcd until ctx ends, as node agents do for workload clusters. It defragments the database when
// much of its file is free. If the database is full, it frees space and clears the alarm. An etcd with this alarm is not ready, so care
// does not wait for the end of the start.
func (p *plane) care(ctx context.Context) {
	if !p.made(ctx) {
		return
	}
	config, err := etcdTLS(p.layout)
	if err == nil {
		care := etcdcare.Care{
			Name: etcdName, Endpoint: loopback("https", p.state.port(portEtcd)), TLS: config,
			Objects: newMemberBoard(p.board), Log: slog.Default(),
		}
		err = care.Run(ctx)
	}
	if err != nil {
		slog.Error("Cannot maintain etcd", "error", err)
	}
}

// memberBoard stores in memory the data that workload clusters store in EtcdMembers. It copies alarms to the status.
type memberBoard struct {
	board *board

	mu      sync.Mutex
	members map[string]etcdv1.EtcdMember
}

func newMemberBoard(b *board) *memberBoard {
	return &memberBoard{board: b, members: map[string]etcdv1.EtcdMember{}}
}

// List implements etcdcare.Objects.
func (m *memberBoard) List() map[string]etcdv1.EtcdMember {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.members)
}

// Changed implements etcdcare.Objects. The only member never leaves.
func (m *memberBoard) Changed() <-chan struct{} { return nil }

// Create implements etcdcare.Objects.
func (m *memberBoard) Create(_ context.Context, name string, spec etcdv1.EtcdMemberSpec) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	member := etcdv1.EtcdMember{Spec: spec}
	member.Name = name
	m.members[name] = member
	return nil
}

// ApplyStatus implements etcdcare.Objects.
func (m *memberBoard) ApplyStatus(_ context.Context, name string, status etcdv1.EtcdMemberStatus) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	member := m.members[name]
	member.Status = status
	m.members[name] = member
	alarms := strings.Join(status.Alarms, ", ")
	if shown, _ := m.board.get(); shown.EtcdAlarms != alarms {
		m.board.update(func(s *Status) { s.EtcdAlarms = alarms })
	}
	return nil
}

// RenewLease implements etcdcare.Objects. There is no other process that maintains this etcd.
func (m *memberBoard) RenewLease(context.Context, string, time.Time) error { return nil }
