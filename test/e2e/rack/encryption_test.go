//go:build e2e

package rack_test

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/rack"
)

// Boxes with --overlay-encryption exchange WireGuard packets and nothing else. A box that they do not know is no member. Keys and
// connections survive capstand, and the encryption cannot change while the network exists.
func TestEncryptedRack(t *testing.T) {
	software := standIns(t)
	software.Args = []string{"--overlay-encryption", "WireGuard"}
	boxes, router := newRack(t, 3, software)
	router.Run(`nft 'add table inet watch; add chain inet watch forward { type filter hook forward priority 0; }
		add counter inet watch sealed; add counter inet watch other
		add rule inet watch forward udp dport 4787 counter name sealed accept
		add rule inet watch forward icmp type destination-unreachable accept
		add rule inet watch forward ip saddr 198.18.0.0/24 ip daddr 198.18.0.0/24 counter name other'`)
	for _, b := range boxes {
		b.mtu = 1370
		b.make()
	}
	members, foreign := boxes[:2], boxes[2]
	if foreign.key() == members[0].key() || len(foreign.key()) != 44 {
		t.Fatalf("the keys are %q and %q", foreign.key(), members[0].key())
	}
	if mode := foreign.Run("stat -c %a:%U " + filepath.Join(foreign.Root, "wireguard.key")); mode != "600:root" {
		t.Errorf("the private key has the mode %s", mode)
	}
	setPeers(t, members...)
	firstContact(t, members...)
	allReach(t, members...)
	setPeers(t, foreign, members[0], members[1])
	setPeers(t, members...) // They do not know the key of the third box.
	allReach(t, members...)
	for _, m := range members {
		if foreign.reaches(m) == nil || foreign.machineReaches(m.address()+":6443") == nil {
			t.Errorf("box %d accepts packets of a box that it does not know", m.Number)
		}
	}
	onlySealed(t, router)

	withoutKeys := &hostpb.SetPeersRequest{NetworkId: clusterID, Namespace: "default", Name: "rack", Hosts: []string{foreign.Tunnel()}}
	if _, err := members[0].SetPeers(members[0].ctx(), withoutKeys); err == nil || refusal.Of(err).Reason != hostpb.Refusal_UNSUPPORTED {
		t.Errorf("a member without a key: %v", err)
	}
	restartKeepsTraffic(t, members[0], members[1])
	replaceProcess(t, members[0], members[1])
	encryptionStays(t, members[1])
	onlySealed(t, router)
}

// firstContact waits until each box reaches each machine.
func firstContact(t *testing.T, boxes ...*box) {
	t.Helper()
	for _, from := range boxes {
		for _, to := range boxes {
			rack.Eventually(t, fmt.Sprintf("a session between the boxes %d and %d", from.Number, to.Number), func() error { return from.reaches(to) })
		}
	}
}

// onlySealed: the boxes have exchanged nothing but WireGuard packets, and reports that one did not arrive because the port was closed
// while a device was created or replaced.
func onlySealed(t *testing.T, router rack.Space) {
	t.Helper()
	if sealed := router.Run("nft list counter inet watch sealed"); strings.Contains(sealed, "packets 0 ") {
		t.Errorf("no encrypted packets: %s", sealed)
	}
	if other := router.Run("nft list counter inet watch other"); !strings.Contains(other, "packets 0 ") {
		t.Errorf("packets that are not encrypted: %s", other)
	}
}

// restartKeepsTraffic: the death and the return of capstand do not interrupt the traffic, and the key stays.
func restartKeepsTraffic(t *testing.T, b, other *box) {
	t.Helper()
	key := b.key()
	gap, failed := longestGap(b, other, func() {
		b.End(syscall.SIGKILL)
		rack.Eventually(t, "an answer without capstand", func() error { return b.reaches(other) })
		b.Start()
		setPeers(t, b, other)
	})
	t.Logf("restart of capstand: %d requests failed, %s without an answer", failed, gap)
	if failed > 1 { // One request of hundreds can take too long on a busy box.
		t.Errorf("%d requests failed while capstand restarted", failed)
	}
	if got := b.key(); got != key {
		t.Errorf("the key %s became %s", key, got)
	}
}

// replaceProcess: capstand replaces the process of the device. A kernel with WireGuard has none.
func replaceProcess(t *testing.T, b, other *box) {
	t.Helper()
	var process struct {
		PID int `json:"pid"`
	}
	record := "/proc/" + b.PID + "/root/run/capstan/wireguard/process.json"
	if !atomicfile.Exists(record) {
		t.Log("this kernel has WireGuard: no process to replace")
		return
	}
	expect.NoError(t, atomicfile.ReadJSON(record, &process))
	if user := b.Run(fmt.Sprintf("grep -E '^(Uid|CapEff):' /proc/%d/status | tr -s '\t\n' ' '", process.PID)); user != "Uid: 65534 65534 65534 65534 CapEff: 0000000000000000" {
		t.Errorf("the process of the device has rights: %s", user)
	}
	gap, failed := longestGap(b, other, func() {
		expect.NoError(t, syscall.Kill(process.PID, syscall.SIGKILL))
		rack.Eventually(t, "another process of the device", func() error {
			before := process.PID
			if err := atomicfile.ReadJSON(record, &process); err != nil || process.PID == before {
				return fmt.Errorf("%d, %w", process.PID, err)
			}
			return nil
		})
		rack.Eventually(t, "traffic through another process", func() error { return b.reaches(other) })
	})
	t.Logf("end of the device's process: %d requests failed, %s without an answer", failed, gap)
}

// longestGap is the longest time without an answer of another box's machine while f runs.
func longestGap(b, other *box, f func()) (gap time.Duration, failed int) {
	ctx, end := context.WithCancel(context.Background())
	var asking sync.WaitGroup
	asking.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for last := time.Now(); ctx.Err() == nil; <-tick.C {
			if b.reaches(other) != nil {
				failed++
				continue
			}
			gap, last = max(gap, time.Since(last)), time.Now()
		}
	})
	f()
	end()
	asking.Wait()
	return gap.Round(time.Millisecond), failed
}

// encryptionStays: a capstand without the option refuses to start while the host has an encrypted network.
func encryptionStays(t *testing.T, b *box) {
	t.Helper()
	b.End(syscall.SIGTERM)
	out, err := b.Command("timeout", "20", b.Capstand, "--root", b.Root, "--assets", b.Assets, "--name", b.Name()).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "is encrypted, and cannot change while it exists") {
		t.Errorf("without --overlay-encryption: %v, %s", err, out)
	}
	b.Start()
}
