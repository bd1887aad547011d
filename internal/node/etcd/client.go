// Package etcd looks after the etcd that a cluster's control plane machines run themselves: a machine
// joins through Join, and the agent on the machine of etcd's leader runs Care, which keeps the
// EtcdMembers, promotes learners, removes members that are to leave or never came, defragments, and
// clears alarms. What is to be done is decided by pure functions (decide.go, join.go); etcd's own
// membership API, which is linearizable and refuses what would break its quorum, is the arbiter.
//
// Layer: node.
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
	// statusTimeout of a question for a member's state: one that is gone does not answer at all, and all
	// others wait for it.
	statusTimeout = 2 * time.Second
	// changeTimeout of a change of the membership. etcd drops one without a word when another is under way,
	// and would let its caller wait for seven seconds; whether it was made is seen in the list.
	changeTimeout = 1500 * time.Millisecond
	// defragTimeout of one member: gibibytes on a slow disk.
	defragTimeout = 5 * time.Minute
	// keepAlive finds out that a machine is gone when no one says so.
	keepAlive = 5 * time.Second
)

// LocalEndpoint is where a machine's own etcd is reached.
const LocalEndpoint = "https://127.0.0.1:2379"

// TLS is mutual TLS with the machine's client certificate of etcd, read anew at each connection because
// it is renewed in place. The folder is nodeconfig.PKIDir on a machine.
func TLS(pkiDir string) (*tls.Config, error) {
	pem, err := os.ReadFile(filepath.Join(pkiDir, "etcd", "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("etcd's CA, which the bootstrap data writes: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate", filepath.Join(pkiDir, "etcd", "ca.crt"))
	}
	load := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		base := filepath.Join(pkiDir, "etcd", "healthcheck-client")
		pair, err := tls.LoadX509KeyPair(base+".crt", base+".key")
		return &pair, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, GetClientCertificate: load}, nil
}

// client of some members.
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

// Member of etcd, as its linearizable list says, and as it answered when it was asked.
type Member struct {
	ID                   uint64
	Name                 string // empty for a member that never started
	PeerURLs, ClientURLs []string
	Learner              bool
	Alarms               []string
	Probe
}

// Probe is what a member said of itself.
type Probe struct {
	// Err is why it did not answer; errNotProbed when it was not asked.
	Err                error
	Leader             uint64
	Version            string
	Size, InUse, Quota int64
	Revision           int64
}

// Started says whether the member has ever run.
func (m Member) Started() bool { return m.Name != "" }

// members is the linearizable list, in the order of ids.
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

// probe asks one member of itself.
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

// clientURLs of the members that take linearizable requests.
func clientURLs(members []Member) []string {
	var out []string
	for _, m := range members {
		if !m.Learner && m.Started() {
			out = append(out, m.ClientURLs...)
		}
	}
	return out
}

// hexID is a member's id as etcd's own tools print it.
func hexID(id uint64) string { return strconv.FormatUint(id, 16) }
