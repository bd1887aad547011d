package manager

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/client-go/tools/events"

	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// A certificate that was not renewed is reported periodically, with its file and its end, until it is renewed.
func TestCertificates(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "webhook")
	serving := func(name string, issued time.Time) {
		t.Helper()
		if err := certfiles.EnsureAuthority(dir, "ca", "ca", issued); err != nil {
			t.Fatal(err)
		}
		leaf := certfiles.Leaf{Name: "tls", CA: "ca", Leaf: pki.Leaf{CommonName: name, Usages: pki.Server}}
		if _, err := leaf.Ensure(dir, 3*time.Hour, issued); err != nil {
			t.Fatal(err)
		}
	}
	serving("old", time.Now().Add(-150*time.Minute))
	expiry.ReportFolder(expiry.KindWebhook, dir)
	recorder := events.NewFakeRecorder(100)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	c := &certificates{recorder: recorder, lease: &coordinationv1.Lease{}, period: time.Millisecond}
	go func() { done <- c.Start(ctx) }()
	for range 2 {
		select {
		case event := <-recorder.Events:
			if !strings.Contains(event, "Warning CertificatesExpiring "+dir+"/tls.crt expires on ") || strings.Contains(event, "ca.crt") {
				t.Errorf("got the event %q", event)
			}
		case <-time.After(time.Minute):
			t.Fatal("no event")
		}
	}
	serving("new", time.Now())
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for len(recorder.Events) > 0 {
		<-recorder.Events
	}
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Start(ctx); err != nil || len(recorder.Events) > 0 {
		t.Errorf("after the renewal: %v, %d events", err, len(recorder.Events))
	}
}
