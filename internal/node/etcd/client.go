// Package etcd manages the etcd that runs on the control plane machines of a cluster. A machine joins through Join. The
// agent on the machine of etcd's leader runs Care, which maintains the EtcdMembers, promotes learners, removes members
// that must leave or never started, defragments, and clears alarms. Pure functions decide on the next step (decide.go,
// join.go). etcd's own membership API is linearizable and refuses changes that would break its quorum.
//
// Layer: node. Allowed imports: api, library, contract.
package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

const (
	dialTimeout = 2 * time.Second
	callTimeout = 3 * time.Second
	// statusTimeout of a status request. All members are checked together, so a member that does not answer delays the
	// others.
	statusTimeout = 2 * time.Second
	// changeTimeout of a change of the membership. etcd drops a change silently while another one is in progress, and
	// the caller would wait for seven seconds. The list of members shows whether the change was made.
	changeTimeout = 1500 * time.Millisecond
	// defragTimeout of one member. It is enough for gibibytes on a slow disk.
	defragTimeout = 5 * time.Minute
	// keepAlive detects machines that disappeared without closing their connections.
	keepAlive = 5 * time.Second
)

// LocalEndpoint is the client URL of a machine's own etcd.
const LocalEndpoint = "https://127.0.0.1:2379"

// TLS returns a mutual TLS configuration with the machine's client certificate of etcd. Each connection reads the
// certificate again, because it is renewed in place. On a machine, the folder is nodeconfig.PKIDir.
func TLS(pkiDir string) (*tls.Config, error) {
	pem, err := os.ReadFile(filepath.Join(pkiDir, "etcd", "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("etcd's CA, which the bootstrap data writes: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s contains no certificate", filepath.Join(pkiDir, "etcd", "ca.crt"))
	}
	load := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		base := filepath.Join(pkiDir, "etcd", "healthcheck-client")
		pair, err := tls.LoadX509KeyPair(base+".crt", base+".key")
		return &pair, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, GetClientCertificate: load}, nil
}

// client returns a client of the given members.
type client struct{ *clientv3.Client }

func dial(config *tls.Config, endpoints ...string) (*client, error) {
	c, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints, TLS: config, DialTimeout: dialTimeout, DialKeepAliveTime: keepAlive,
		DialKeepAliveTimeout: keepAlive, Logger: zap.NewNop(),
	})
	if err != nil {
		return nil, fmt.Errorf("etcd client of %s: %w", strings.Join(endpoints, ", "), err)
	}
	return &client{c}, nil
}

// Member of etcd: its entry in the linearizable list, and its answer to a status request.
type Member struct {
	ID                   uint64
	Name                 string // empty for a member that never started
	PeerURLs, ClientURLs []string
	Learner              bool
	Alarms               []string
	Probe
}

// Probe is the answer of a member to a status request.
type Probe struct {
	// Err is the reason for a missing answer; errNotProbed without a request.
	Err                error
	Leader             uint64
	Version            string
	Size, InUse, Quota int64
	Revision           int64
}

// Started reports whether the member has ever run.
func (m Member) Started() bool { return m.Name != "" }

// members returns the linearizable list, sorted by id.
func (c *client) members(ctx context.Context) ([]Member, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	list, err := c.MemberList(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing etcd's members: %w", err)
	}
	return membersOf(list.Members), nil
}

func membersOf(list []*etcdserverpb.Member) []Member {
	var out []Member
	for _, m := range list {
		out = append(out, Member{ID: m.ID, Name: m.Name, PeerURLs: m.PeerURLs, ClientURLs: m.ClientURLs, Learner: m.IsLearner})
	}
	slices.SortFunc(out, func(a, b Member) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return out
}

// probe requests the status of one member.
func (c *client) probe(ctx context.Context, endpoint string) Probe {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	s, err := c.Status(ctx, endpoint)
	if err != nil {
		return Probe{Err: err}
	}
	return Probe{Leader: s.Leader, Version: s.Version, Size: s.DbSize, InUse: s.DbSizeInUse, Quota: s.DbSizeQuota, Revision: s.Header.Revision}
}

func alarmsOf(list []*etcdserverpb.AlarmMember, id uint64) []string {
	var out []string
	for _, a := range list {
		if a.MemberID == id && a.Alarm != etcdserverpb.AlarmType_NONE {
			out = append(out, a.Alarm.String())
		}
	}
	slices.Sort(out)
	return out
}

// clientURLs returns the URLs of the members that serve linearizable requests.
func clientURLs(members []Member) []string {
	var out []string
	for _, m := range members {
		if !m.Learner && m.Started() {
			out = append(out, m.ClientURLs...)
		}
	}
	return out
}

// hexID returns a member's id in the notation of etcd's tools.
func hexID(id uint64) string { return strconv.FormatUint(id, 16) }
