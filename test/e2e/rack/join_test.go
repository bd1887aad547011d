//go:build e2e

package rack_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/rack"
)

const (
	// planeAddress is that of the management plane in the network of the boxes.
	planeAddress = "198.18.0.254"
	joinServer   = "https://" + planeAddress + ":7442"
	joinedName   = "joined"
	providerNS   = "capstan-infrastructure-system"
)

// One management plane admits both hosts, one after another: it connects to the first, and the second dials it.
func TestJoin(t *testing.T) {
	plane := startPlane(t, "--no-hosts", "--api-address", planeAddress+":7442", "--host-listen-address", ":"+dialPort)
	t.Run("token", func(t *testing.T) { joinWithToken(t, plane) })
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: joinedName}}
	expect.NoError(t, plane.Client.Delete(t.Context(), host))
	gone(t, plane, host)
	t.Run("behind NAT", func(t *testing.T) { joinBehindNAT(t, plane) })
}

// Issue "joining": a bare box joins a management plane with a token, over TCP with mutual TLS, and gets a machine. A join that is
// killed between two of its steps succeeds when it is run again. Tokens that were used, revoked, have expired or are for another
// host admit nobody. Certificates and their authority are replaced while capstand runs. The deletion of the CapstanHost ends the
// access of its managers and the token for this host. A leave that is killed between two of its steps succeeds when it is run again.
func joinWithToken(t *testing.T, plane *harness.Plane) {
	boxes, router := newRack(t, 2, rack.Software{Capstand: filepath.Join(harness.Bin(), "capstand"), Assets: harness.Bin()})
	rack.Uplink(t, router)
	b := boxes[0]
	for _, b := range boxes {
		b.Run("mkdir -p /run/capstan/networks /run/capstan/netns") // cleanUp expects them, and one box gets no machine.
	}

	refuseTokens(t, plane, b)
	refusePlane(t, plane, b)
	issued := time.Now()
	text, name := newToken(t, plane, "--failure-domain", "row-2", "--label", "disk=fast", "--allow-namespace", "default,other", "--valid-for", "3m")
	killJoins(t, b, text)
	out, err := b.joins(text)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	checkUses(t, plane, name)
	refuseThief(t, boxes[1], text)
	b.listens()
	host := ready(t, plane)
	checkHost(t, b, host)
	refuseForeigner(t, host)
	refuseDuplicate(t, plane, boxes)

	c := plane.CreateCluster(t, "default", "joined", "--control-plane-machines", "1", "--workers", "0", "--timeout", "5m")
	harness.Eventually(t, "a Node on the host", time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 1) })
	for _, m := range c.Machines(t) {
		if m.Spec.HostName != joinedName {
			t.Errorf("machine %s is on %s", m.Name, m.Spec.HostName)
		}
	}
	renewed(t, plane, b, issued)
	rotated(t, plane, b)
	rejoins(t, plane, b)
	refuseLeave(t, b, c.Machines(t)[0].Name)
	c.Delete(t)
	removed(t, plane, b, text)
	leaves(t, b)
	again, _ := newToken(t, plane, "--allow-namespace", "nobody")
	if out, err := b.joins(again); err != nil {
		t.Errorf("a join after the leave: %v: %s", err, out)
	}
}

// newToken creates a token, and returns it and the name of its Secret.
func newToken(t *testing.T, plane *harness.Plane, args ...string) (text, name string) {
	t.Helper()
	out, err := plane.Capstan(t.Context(), append([]string{"host", "token", "create", "-o", "json"}, args...)...)
	expect.NoError(t, err)
	var token struct{ Name, Server, Token string }
	expect.NoError(t, json.Unmarshal([]byte(out), &token))
	if token.Server != joinServer {
		t.Fatalf("the token is for %s", token.Server)
	}
	return token.Token, token.Name
}

// joinCommand is the command of the box that joins.
func (b *box) joinCommand(token string, args ...string) *exec.Cmd {
	return b.joinCommandAt(joinServer, token, args...)
}

func (b *box) joinCommandAt(server, token string, args ...string) *exec.Cmd {
	cmd := b.Command(append([]string{filepath.Join(harness.Bin(), "capstan"), "host", "join", server, "--token-file", "-",
		"--name", joinedName, "--dir", filepath.Join(b.Root, "tls"), "--timeout", "30s"}, args...)...)
	cmd.Stdin = strings.NewReader(token)
	return cmd
}

func (b *box) joins(token string, args ...string) (string, error) {
	out, err := b.joinCommand(token, args...).CombinedOutput()
	return string(out), err
}

// refused expects that the box cannot join, and the reason.
func (b *box) refused(token, why string, args ...string) {
	b.t.Helper()
	if out, err := b.joins(token, args...); err == nil || !strings.Contains(out, why) {
		b.t.Errorf("the join ended with %v, want %q: %s", err, why, out)
	}
}

// refuseTokens expects that tokens which are not valid admit nobody.
func refuseTokens(t *testing.T, plane *harness.Plane, b *box) {
	t.Helper()
	expired, name := newToken(t, plane, "--ttl", "10s")
	other, _ := newToken(t, plane, "--name", "another")
	b.refused(other, `the token is only for the host name "another"`)
	revoked, secret := newToken(t, plane)
	_, err := plane.Capstan(t.Context(), "host", "token", "revoke", secret)
	expect.NoError(t, err)
	b.refused(revoked, "revoked")
	harness.Eventually(t, "an expired token is deleted", time.Minute, func(ctx context.Context) error {
		err := plane.Client.Get(ctx, client.ObjectKey{Namespace: providerNS, Name: name}, &corev1.Secret{})
		if err == nil {
			return errors.New("it exists")
		}
		return client.IgnoreNotFound(err)
	})
	b.refused(expired, "expired")
	hosts := &infrav1.CapstanHostList{}
	expect.NoError(t, plane.Client.List(t.Context(), hosts))
	if len(hosts.Items) > 0 {
		t.Errorf("%d hosts joined", len(hosts.Items))
	}
}

// refusePlane expects that a host does not send its token to another server.
func refusePlane(t *testing.T, plane *harness.Plane, b *box) {
	t.Helper()
	listener, err := net.Listen("tcp", planeAddress+":0")
	expect.NoError(t, err)
	received := make(chan string, 16)
	foreign := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { received <- r.Header.Get("Authorization") }))
	foreign.Listener = listener
	foreign.StartTLS()
	defer foreign.Close()
	token, _ := newToken(t, plane)
	cmd := b.joinCommandAt("https://"+listener.Addr().String(), token)
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "is not the management API of the token") {
		t.Errorf("a foreign server: %v: %s", err, out)
	}
	if len(received) > 0 {
		t.Error("a foreign server received a request")
	}
}

// killJoins kills a join after each of its steps.
func killJoins(t *testing.T, b *box, token string) {
	t.Helper()
	killSteps(t, func() *exec.Cmd { return b.joinCommand(token) }, "The key of this host", "has the certificate request", "The certificate is in")
}

// killSteps runs a command for each step, and kills it when it reports the step. On a busy box, the command goes on for a moment: it can
// report further steps before it is killed, and can even end.
func killSteps(t *testing.T, command func() *exec.Cmd, steps ...string) {
	t.Helper()
	var reported bytes.Buffer
	for _, step := range steps {
		if strings.Contains(reported.String(), step) {
			t.Logf("the command is not killed after %q: it was killed there in place of an earlier step", step)
			continue
		}
		cmd := command()
		stderr, err := cmd.StderrPipe()
		expect.NoError(t, err)
		expect.NoError(t, cmd.Start())
		for s := bufio.NewScanner(stderr); s.Scan(); {
			fmt.Fprintln(&reported, s.Text())
			if strings.Contains(s.Text(), step) {
				_ = cmd.Process.Kill() // fails if it has ended
			}
		}
		_ = cmd.Wait() // killed, or at its end
		if !strings.Contains(reported.String(), step) {
			t.Fatalf("the command has no step %q: %s", step, &reported)
		}
	}
}

// checkUses expects that one host used the token, however often it tried.
func checkUses(t *testing.T, plane *harness.Plane, name string) {
	t.Helper()
	secret := &corev1.Secret{}
	expect.NoError(t, plane.Client.Get(t.Context(), client.ObjectKey{Namespace: providerNS, Name: name}, secret))
	var uses joining.Uses
	expect.NoError(t, json.Unmarshal(secret.Data[joining.KeyHosts], &uses))
	hosts := &infrav1.CapstanHostList{}
	expect.NoError(t, plane.Client.List(t.Context(), hosts))
	if len(uses) != 1 || len(hosts.Items) != 1 {
		t.Errorf("%d keys and %d hosts joined with one token", len(uses), len(hosts.Items))
	}
}

// refuseThief expects that another box cannot join with a used token, and cannot take the name of the host.
func refuseThief(t *testing.T, thief *box, token string) {
	t.Helper()
	thief.refused(token, "the token was used by another host", "--name", "thief")
	thief.refused(token, "the token was used by another host")
}

// listens starts the capstand of the box again, as `capstan host join` prints it.
func (b *box) listens() {
	b.t.Helper()
	key, err := os.Stat(filepath.Join(b.Root, "tls", "server.key"))
	expect.NoError(b.t, err)
	if key.Mode().Perm() != 0o600 {
		b.t.Errorf("the key has mode %v", key.Mode())
	}
	b.End(syscall.SIGTERM)
	b.Args = append(b.Args, "--listen", ":7443")
	b.Start()
}

// rejoins expects that the box joins its plane again at another URL, with the failure domain that its user sets, and stays connected.
func rejoins(t *testing.T, plane *harness.Plane, b *box) {
	t.Helper()
	other, _ := newToken(t, plane)
	b.refused(other, "a CapstanHost "+joinedName+" exists")
	token, _ := newToken(t, plane, "--name", joinedName)
	if out, err := b.joinCommandAt(joinServer+"/", token, "--failure-domain", "row-3").CombinedOutput(); err != nil {
		t.Errorf("a join at another URL: %v: %s", err, out)
	}
	if s := ready(t, plane).Spec; s.FailureDomain != "row-3" || s.TunnelAddress != b.Tunnel() {
		t.Errorf("spec: %+v", s)
	}
}

// leaveCommand is the command of the box that leaves.
func (b *box) leaveCommand(args ...string) *exec.Cmd {
	return b.Command(append([]string{filepath.Join(harness.Bin(), "capstan"), "host", "leave", "--dir", filepath.Join(b.Root, "tls")}, args...)...)
}

// refuseLeave expects that a box with a machine does not leave, and stays connected.
func refuseLeave(t *testing.T, b *box, machine string) {
	t.Helper()
	out, err := b.leaveCommand().CombinedOutput()
	for _, want := range []string{"machine default/" + machine, "load balancer default/joined", `'{"spec":{"drain":true}}'`} {
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("the leave of a box in use ended with %v, want %q: %s", err, want, out)
		}
	}
	if !b.Runs() {
		t.Error("the refused leave ended capstand")
	}
}

// removed deletes the CapstanHost while the box is connected. It expects that the box cannot come back with its key and its token,
// and that nobody has the credentials of its managers any more.
func removed(t *testing.T, plane *harness.Plane, b *box, token string) {
	t.Helper()
	host := ready(t, plane)
	expect.NoError(t, plane.Client.Delete(t.Context(), host))
	gone(t, plane, host, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: providerNS, Name: joinedName + "-credentials"}})
	expect.NoError(t, os.Remove(filepath.Join(b.Root, "tls", "server.crt"))) // It asks for another one, with its key.
	b.refused(token, "the CapstanHost of this host was deleted")
}

// gone waits until objects do not exist.
func gone(t *testing.T, plane *harness.Plane, objs ...client.Object) {
	t.Helper()
	for _, obj := range objs {
		harness.Eventually(t, fmt.Sprintf("the end of %T %s", obj, obj.GetName()), time.Minute, func(ctx context.Context) error {
			err := plane.Client.Get(ctx, client.ObjectKeyFromObject(obj), obj)
			if err == nil {
				return errors.New("it exists")
			}
			return client.IgnoreNotFound(err)
		})
	}
}

// leaves kills a leave after each of its steps, and completes it.
func leaves(t *testing.T, b *box) {
	t.Helper()
	if out, err := b.leaveCommand().CombinedOutput(); err == nil || !strings.Contains(string(out), "stop it, and run the command again") {
		t.Errorf("the leave beside a running capstand: %v: %s", err, out)
	}
	b.End(syscall.SIGTERM)
	b.Args = slices.DeleteFunc(b.Args, func(arg string) bool { return arg == "--listen" || arg == ":7443" })
	killSteps(t, func() *exec.Cmd { return b.leaveCommand() }, "Removing the options", "Removing the key", "Removing the record")
	out, err := b.leaveCommand().CombinedOutput()
	if err != nil || !strings.Contains(string(out), "This host has") {
		t.Errorf("%v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(b.Root, "tls")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of the certificates: %v", err)
	}
	if out, err := b.leaveCommand().CombinedOutput(); err != nil || !strings.Contains(string(out), "has not joined") {
		t.Errorf("a second leave: %v: %s", err, out)
	}
}

func ready(t *testing.T, plane *harness.Plane) *infrav1.CapstanHost {
	t.Helper()
	host := &infrav1.CapstanHost{}
	harness.Eventually(t, "a host is Ready", time.Minute, func(ctx context.Context) error {
		if err := plane.Client.Get(ctx, client.ObjectKey{Name: joinedName}, host); err != nil {
			return err
		}
		if c := conditions.Get(host, "Ready"); c == nil || c.Status != metav1.ConditionTrue {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
	return host
}

// checkHost expects the terms of the token and the properties of the box.
func checkHost(t *testing.T, b *box, host *infrav1.CapstanHost) {
	t.Helper()
	s := host.Status
	if host.Spec.Address != b.Tunnel()+":7443" || host.Spec.TunnelAddress != b.Tunnel() || host.Spec.FailureDomain != "row-2" || host.Labels["disk"] != "fast" || len(host.Spec.AllowedNamespaces.Names) != 2 {
		t.Errorf("spec: %+v, labels %v", host.Spec, host.Labels)
	}
	if s.Capacity.Memory().IsZero() || len(s.Versions) == 0 || s.System.KernelVersion == "" || s.System.OSImage == "" || s.System.CapstandVersion == "" ||
		s.System.CgroupVersion == nil || s.BoxID == "" {
		t.Errorf("status: %+v", s)
	}
}

// refuseForeigner expects that the certificates of another host are useless.
func refuseForeigner(t *testing.T, host *infrav1.CapstanHost) {
	t.Helper()
	foreign, err := credentials.NewAuthority(time.Hour, time.Now())
	expect.NoError(t, err)
	transport, err := foreign.Transport(time.Now(), nil)
	expect.NoError(t, err)
	conn, err := net.DialTimeout("tcp", host.Spec.Address, 5*time.Second)
	expect.NoError(t, err)
	defer conn.Close()
	if _, _, err := transport.ClientHandshake(t.Context(), host.Spec.Address, conn); err == nil {
		t.Error("a manager with foreign certificates is connected")
	}
}

// refuseDuplicate expects that a box with the machine-id or the name of another one cannot join.
func refuseDuplicate(t *testing.T, plane *harness.Plane, boxes []*box) {
	t.Helper()
	token, _ := newToken(t, plane)
	boxes[1].refused(token, "a CapstanHost "+joinedName+" exists")
	boxes[1].refused(token, "has the tunnel address", "--name", "copy", "--tunnel-address", boxes[0].Tunnel())
	boxes[1].refused(token, "has the address", "--name", "copy", "--address", boxes[0].Tunnel()+":7443")
	boxes[1].Run(fmt.Sprintf("mount --bind %s /etc/machine-id", filepath.Join(filepath.Dir(boxes[0].Root), "machine-id")))
	boxes[1].refused(token, "has the same machine-id", "--name", "copy")
}

// secretOf returns the credentials of the host.
func secretOf(t *testing.T, plane *harness.Plane) credentials.Managed {
	t.Helper()
	secret := &corev1.Secret{}
	expect.NoError(t, plane.Client.Get(t.Context(), client.ObjectKey{Namespace: providerNS, Name: joinedName + "-credentials"}, secret))
	m, err := credentials.AuthorityFromSecret(secret.Data)
	expect.NoError(t, err)
	return m
}

// renewed expects that both certificates are renewed without a restart, and before they expire.
func renewed(t *testing.T, plane *harness.Plane, b *box, issued time.Time) {
	t.Helper()
	harness.Eventually(t, "renewed certificates", time.Minute, func(context.Context) error {
		server, err := pki.ReadCert(filepath.Join(b.Root, "tls", "server.crt"))
		if err != nil {
			return err
		}
		// The first certificates end three minutes after the join.
		for name, c := range map[string]time.Time{"server": server.NotAfter, "client": secretOf(t, plane).Certificate().NotAfter} {
			if c.Before(issued.Add(3*time.Minute + 18*time.Second)) {
				return fmt.Errorf("the certificate of the %s expires at %s", name, c)
			}
		}
		return nil
	})
	ready(t, plane)
}

// rotated expects that another authority takes the place of the first one, and that the host stays connected.
func rotated(t *testing.T, plane *harness.Plane, b *box) {
	t.Helper()
	old := secretOf(t, plane)
	host := ready(t, plane)
	since := conditions.Get(host, infrav1.HostConnectedCondition).LastTransitionTime
	before := host.DeepCopy()
	metav1.SetMetaDataAnnotation(&host.ObjectMeta, infrav1.HostRotateAuthorityAnnotation, "")
	expect.NoError(t, plane.Client.Patch(t.Context(), host, client.MergeFrom(before)))
	harness.Eventually(t, "another authority", time.Minute, func(context.Context) error {
		m := secretOf(t, plane)
		own, err := os.ReadFile(filepath.Join(b.Root, "tls", "ca.crt"))
		if err != nil {
			return err
		}
		if bytes.Contains(m.CA, old.CA) || !bytes.Equal(m.CA, own) {
			return errors.New("the managers or the host trust the old authority")
		}
		return nil
	})
	host = ready(t, plane)
	if c := conditions.Get(host, infrav1.HostConnectedCondition); c.LastTransitionTime.Sub(since.Time) > 0 {
		t.Logf("the connection was replaced at %s", c.LastTransitionTime)
	}
	if _, stays := host.Annotations[infrav1.HostRotateAuthorityAnnotation]; stays {
		t.Error("the annotation stays")
	}
	transport, err := old.Transport(time.Now(), nil)
	expect.NoError(t, err)
	conn, err := net.DialTimeout("tcp", host.Spec.Address, 5*time.Second)
	expect.NoError(t, err)
	defer conn.Close()
	if _, _, err := transport.ClientHandshake(t.Context(), host.Spec.Address, conn); err == nil {
		t.Error("certificates of the old authority are admitted")
	}
}
