package host

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/machineapi"
)

// The machine can write to the folder. capstand does not follow a link in place of the socket.
func TestInitSocket(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	listener, err := net.Listen("unix", filepath.Join(dir, "init.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"bootstrap":"Succeeded"}` + "\n"))
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	if err := os.Symlink(filepath.Join(dir, "init.sock"), filepath.Join(other, "init.sock")); err != nil {
		t.Fatal(err)
	}
	for from, want := range map[string]int{dir: 1, other: 0} {
		heard := 0
		err := streamInit(context.Background(), from, func(machineapi.Status) { heard++ })
		if heard != want || (err == nil) != (want == 1) {
			t.Errorf("%s: received %d, want %d, %v", from, heard, want, err)
		}
	}
}

// TestWatchInit checks that capstand finds a socket that appears late, after growing pauses. After a connection with an answer, it connects
// again after the shortest pause.
func TestWatchInit(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"bootstrap":"Waiting"}` + "\n"))
	})}
	t.Cleanup(func() { _ = server.Close() })
	var pauses []time.Duration
	heard := 0
	watchInitAfter(ctx, dir, func(machineapi.Status) { heard++ }, func(pause time.Duration) {
		switch pauses = append(pauses, pause); len(pauses) {
		case 3:
			listener, err := net.Listen("unix", filepath.Join(dir, "init.sock"))
			if err != nil {
				t.Error(err)
				cancel()
				return
			}
			go func() { _ = server.Serve(listener) }()
		case 5:
			cancel()
		}
	})
	want := []time.Duration{firstInitPause, 2 * firstInitPause, 4 * firstInitPause, firstInitPause, firstInitPause}
	if !slices.Equal(pauses, want) || heard != 2 {
		t.Errorf("heard %d states with the pauses %v, want 2 with %v", heard, pauses, want)
	}
}

// A machine that reports changes without a pause does not occupy capstand and its clients: over several connections, too.
func TestReportsAreLimited(t *testing.T) {
	dir := t.TempDir()
	listener, err := net.Listen("unix", filepath.Join(dir, "init.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for range reportBurst / 2 {
			_, _ = w.Write([]byte(`{"bootstrap":"Waiting"}` + "\n"))
		}
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	heard, begun := 0, time.Now()
	watchInit(ctx, dir, func(machineapi.Status) {
		if heard++; heard == reportBurst+10 {
			cancel()
		}
	})
	if took := time.Since(begun); heard < reportBurst+10 || took < 900*time.Millisecond {
		t.Errorf("%d reports were read in %s", heard, took)
	}
}

// The users of a machine control the reports of its PID 1. capstand bounds the number of certificates and the length of names.
func TestInitCertificates(t *testing.T) {
	at := time.Unix(7, 0)
	var claimed []machineapi.Certificate
	for _, name := range []string{"apiserver", "", strings.Repeat("a", maxName+1), "\xff", "clients/kube-proxy"} {
		claimed = append(claimed, machineapi.Certificate{Name: name, NotBefore: at, NotAfter: at.Add(time.Hour)})
	}
	got := certificateStatuses(machineapi.Status{Certificates: claimed})
	if len(got) != 2 || got[0].GetName() != "apiserver" || got[1].GetName() != "clients/kube-proxy" || !got[1].GetNotAfter().AsTime().Equal(at.Add(time.Hour)) {
		t.Errorf("accepted %v", got)
	}
	for range 2 * maxCertificates {
		claimed = append(claimed, machineapi.Certificate{Name: "more"})
	}
	if got := certificateStatuses(machineapi.Status{Certificates: claimed}); len(got) > maxCertificates {
		t.Errorf("accepted %d", len(got))
	}
}

// The same holds for its services.
func TestInitServices(t *testing.T) {
	claimed := []machineapi.Service{
		{Name: "etcd", State: machineapi.StateReady, Message: "one\ntwo" + strings.Repeat("x", maxMessage)}, {Name: ""}, {Name: strings.Repeat("a", maxName+1)},
	}
	got := serviceStatuses(machineapi.Status{Services: claimed})
	if len(got) != 1 || got[0].Name != "etcd" || got[0].State != "ready" || len(got[0].Message) != maxMessage || !strings.HasPrefix(got[0].Message, "one two") {
		t.Errorf("accepted %v", got)
	}
	for range 2 * maxServices {
		claimed = append(claimed, machineapi.Service{Name: "more"})
	}
	if got := serviceStatuses(machineapi.Status{Services: claimed}); len(got) > maxServices {
		t.Errorf("accepted %d", len(got))
	}
}
