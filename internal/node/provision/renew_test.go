package provision

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// TestRenewalCredential: a valid certificate authenticates its own renewal. After its expiry, the renewal uses the kubelet's
// credential. The API server would refuse expired certificates of kube-proxy and the node agent.
func TestRenewalCredential(t *testing.T) {
	dir := t.TempDir()
	key, err := certfiles.EnsureKey(filepath.Join(dir, "key"))
	if err != nil {
		t.Fatal(err)
	}
	made, err := cert.NewSelfSignedCACert(cert.Config{CommonName: "x"}, key)
	if err != nil {
		t.Fatal(err)
	}
	r := ClientRequest{CertFile: filepath.Join(dir, "crt"), Kubeconfig: "own"}
	if err := certfiles.WriteFile(r.CertFile, pki.EncodeCert(made)); err != nil {
		t.Fatal(err)
	}
	none := ClientRequest{CertFile: filepath.Join(dir, "none"), Kubeconfig: "own"}
	for name, c := range map[string]struct {
		request    ClientRequest
		at         time.Time
		kubeconfig string
		until      time.Time
	}{
		"valid":         {r, made.NotAfter.Add(-time.Second), "own", made.NotAfter},
		"expired":       {r, made.NotAfter, nodeconfig.KubeletKubeconfig, time.Time{}},
		"not valid yet": {r, made.NotBefore.Add(-time.Second), nodeconfig.KubeletKubeconfig, time.Time{}},
		"unreadable":    {none, time.Now(), nodeconfig.KubeletKubeconfig, time.Time{}},
	} {
		t.Run(name, func(t *testing.T) {
			if kubeconfig, until := c.request.credential(c.at); kubeconfig != c.kubeconfig || !until.Equal(c.until) {
				t.Errorf("got %s until %s, want %s until %s", kubeconfig, until, c.kubeconfig, c.until)
			}
		})
	}
}

// TestRenewAll: an open request does not delay another renewal, an error does not hide the others, and the earliest time counts.
func TestRenewAll(t *testing.T) {
	soon, later := time.Now().Add(time.Minute), time.Now().Add(2*time.Minute)
	renewed := make(chan struct{})
	next, err := renewAll([]func() (time.Time, error){
		func() (time.Time, error) {
			select {
			case <-renewed:
				return later, errors.New("refused")
			case <-time.After(time.Minute):
				return later, errors.New("the second renewal waits for the first one")
			}
		},
		func() (time.Time, error) { close(renewed); return soon, nil },
	})
	if !next.Equal(soon) || err == nil || err.Error() != "refused" {
		t.Errorf("next at %s, %v", next, err)
	}
}
