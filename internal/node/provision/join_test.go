package provision

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv/expect"
)

// A joining etcd gets the list of the other members. The first etcd creates a new cluster.
func TestEtcdArguments(t *testing.T) {
	joining := testNode(nodeconfig.RoleControlPlane, nil)
	joining.initialCluster = "a=https://10.0.0.9:2380,m=https://10.0.0.2:2380"
	for role, want := range map[nodeconfig.Role][]string{
		nodeconfig.RoleInit:         {"--initial-cluster=m=https://10.0.0.2:2380", "--initial-cluster-state=new"},
		nodeconfig.RoleControlPlane: {"--initial-cluster=" + joining.initialCluster, "--initial-cluster-state=existing"},
	} {
		n := testNode(role, nil)
		n.initialCluster = joining.initialCluster
		command := n.etcdService().Command
		for _, arg := range append(want, "--listen-client-urls=https://127.0.0.1:2379,https://10.0.0.2:2379", "--listen-peer-urls=https://10.0.0.2:2380",
			"--client-cert-auth=true", "--peer-client-cert-auth=true") {
			if !slices.Contains(command, arg) {
				t.Errorf("%s: %s is missing in %v", role, arg, command)
			}
		}
	}
}

func TestMembersOwnArgumentsAreRefused(t *testing.T) {
	for _, name := range nodeconfig.OwnEtcdArgs {
		n := testNode(nodeconfig.RoleControlPlane, func(c *nodeconfig.NodeConfiguration) {
			c.ControlPlane.Etcd.ExtraArgs = []nodeconfig.Arg{arg(name, "x")}
		})
		if err := n.checkArguments(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	n := testNode(nodeconfig.RoleControlPlane, func(c *nodeconfig.NodeConfiguration) {
		c.ControlPlane.Etcd.ExtraArgs = []nodeconfig.Arg{arg("data-dir", "/var/lib/other"), arg("quota-backend-bytes", "8589934592")}
	})
	if err := n.checkArguments(); err != nil {
		t.Error(err)
	}
	// The data-dir argument names the directory that is checked for a lost disk.
	if dir := valueOf(n.etcdService().Command, "data-dir"); dir != "/var/lib/other" {
		t.Errorf("data-dir %s", dir)
	}
}

func TestEtcdEndpoints(t *testing.T) {
	member := func(name, url string, status metav1.ConditionStatus) etcdv1.EtcdMember {
		return etcdv1.EtcdMember{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: etcdv1.EtcdMemberSpec{ClientURL: url},
			Status: etcdv1.EtcdMemberStatus{Conditions: []metav1.Condition{{Type: etcdv1.JoinedCondition, Status: status}}},
		}
	}
	got := etcdEndpoints([]etcdv1.EtcdMember{
		member("b", "https://b:2379", metav1.ConditionTrue), member("a", "https://a:2379", metav1.ConditionTrue),
		member("learner", "https://l:2379", metav1.ConditionFalse), {Spec: etcdv1.EtcdMemberSpec{ClientURL: "https://new:2379"}},
	})
	if diff := cmp.Diff([]string{"https://a:2379", "https://b:2379"}, got); diff != "" {
		t.Error(diff)
	}
}

// TestAlgorithmOfLeaves: each certificate that a control plane machine signs has a key of the algorithm. A renewal keeps the key.
func TestAlgorithmOfLeaves(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"ca", "etcd/ca", "front-proxy-ca"} {
		if err := certfiles.EnsureAuthority(dir, name, name, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	made := func(algorithm pki.Algorithm, at time.Time) {
		t.Helper()
		n := testNode(nodeconfig.RoleControlPlane, func(c *nodeconfig.NodeConfiguration) { c.ControlPlane.EncryptionAlgorithm = string(algorithm) })
		if _, err := ensureLeaves(dir, n.leaves(), 90*24*time.Hour, at); err != nil {
			t.Fatal(err)
		}
		for _, leaf := range n.leaves() {
			c, err := pki.ReadCert(filepath.Join(dir, leaf.Name+".crt"))
			if err != nil {
				t.Fatal(err)
			}
			if key, ok := c.PublicKey.(*ecdsa.PublicKey); !ok || key.Curve != elliptic.P384() || !c.NotAfter.Equal(at.Add(90*24*time.Hour).UTC()) {
				t.Errorf("%s has a key %T until %s", leaf.Name, c.PublicKey, c.NotAfter)
			}
		}
	}
	now := time.Now().Truncate(time.Second)
	made(pki.ECDSAP384, now)
	made("", now.Add(61*24*time.Hour))
}

// CP-15: expires returns the earliest expiry of all certificates. A renewal moves it.
func TestRenewalAndFirstExpiry(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"ca", "etcd/ca", "front-proxy-ca"} {
		if err := certfiles.EnsureAuthority(dir, name, name, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	leaves := testNode(nodeconfig.RoleControlPlane, nil).leaves()
	now := time.Now().Truncate(time.Second)
	if _, err := ensureLeaves(dir, leaves, 90*24*time.Hour, now); err != nil {
		t.Fatal(err)
	}
	short := leaves[len(leaves)-1]
	if _, err := short.Ensure(t.TempDir(), time.Hour, now); err == nil {
		t.Error("a certificate was signed without a CA")
	}
	expires := func() time.Time {
		at, err := firstExpiry(dir, leaves)
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	if at := expires(); !at.Equal(now.Add(90 * 24 * time.Hour).UTC()) {
		t.Errorf("expires %s", at)
	}
	// All certificates are renewed after two thirds of their lifetime, and not a day earlier.
	next, err := ensureLeaves(dir, leaves, 90*24*time.Hour, now.Add(59*24*time.Hour))
	if err != nil || !expires().Equal(now.Add(90*24*time.Hour).UTC()) || next.After(now.Add(61*24*time.Hour)) {
		t.Errorf("next %s, expires %s, %v", next, expires(), err)
	}
	if _, err := ensureLeaves(dir, leaves, 90*24*time.Hour, now.Add(61*24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if at := expires(); !at.Equal(now.Add(151 * 24 * time.Hour).UTC()) {
		t.Errorf("expires %s after the renewal", at)
	}
}

// The first machine of a cluster begins a new etcd on the volumes of a former machine: the former data is renamed, and its log is removed. It
// keeps data of its own, and data that it has restored. A machine that joins decides with the list of members.
func TestFormerEtcdIsLeft(t *testing.T) {
	for name, test := range map[string]struct {
		role          nodeconfig.Role
		member        bool
		started       bool
		restored      string
		removed, left bool
	}{
		"first machine":                    {role: nodeconfig.RoleInit, member: true, removed: true, left: true},
		"only the log is on a volume":      {role: nodeconfig.RoleInit, removed: true},
		"first machine that ran":           {role: nodeconfig.RoleInit, member: true, started: true},
		"first machine that restored":      {role: nodeconfig.RoleInit, member: true, restored: "demo/etcd-1/m"},
		"a former machine restored":        {role: nodeconfig.RoleInit, member: true, restored: "demo/etcd-1/other", removed: true, left: true},
		"another machine of control plane": {role: nodeconfig.RoleControlPlane, member: true},
	} {
		data, wal, services := filepath.Join(t.TempDir(), "data"), filepath.Join(t.TempDir(), "wal"), t.TempDir()
		log, db := filepath.Join(wal, "0000000000000000-0000000000000000.wal"), filepath.Join("snap", "db")
		expect.NoError(t, errors.Join(os.MkdirAll(wal, 0o700), os.WriteFile(log, nil, 0o600)))
		if test.member {
			expect.NoError(t, errors.Join(os.MkdirAll(filepath.Join(data, "member", "snap"), 0o700), os.WriteFile(filepath.Join(data, "member", db), nil, 0o600)))
		}
		if test.restored != "" {
			expect.NoError(t, os.WriteFile(filepath.Join(data, "member", "restored-from"), []byte(test.restored), 0o600))
		}
		if test.started {
			expect.NoError(t, os.WriteFile(filepath.Join(services, "etcd.yaml"), nil, 0o600))
		}
		n := testNode(test.role, func(c *nodeconfig.NodeConfiguration) {
			c.ControlPlane.Etcd.ExtraArgs = []nodeconfig.Arg{arg("data-dir", data), arg("wal-dir", wal)}
		})
		n.log = slog.New(slog.DiscardHandler)
		for range 2 { // without any data, too
			expect.NoError(t, n.leaveFormerEtcd(services))
		}
		if removed := !atomicfile.Exists(log); removed != test.removed {
			t.Errorf("%s: the log is removed: %v", name, removed)
		}
		if left := atomicfile.Exists(filepath.Join(data, "member-before-m", db)); left != test.left || test.member && !left && !atomicfile.Exists(filepath.Join(data, "member", db)) {
			t.Errorf("%s: the data is left: %v", name, left)
		}
	}
}
