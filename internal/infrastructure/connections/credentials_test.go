package connections

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
)

// The remedy for expired credentials works on the host: one that joined refuses `capstan host credentials`.
func TestExpiredCredentials(t *testing.T) {
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "rack-1"}, Spec: infrav1.CapstanHostSpec{Address: "10.0.0.5:7443"}}
	before := time.Now().Add(-time.Hour)
	joined, err1 := credentials.NewAuthority(time.Minute, before)
	own, err2 := credentials.Make(t.TempDir(), []string{"10.0.0.5"}, time.Minute, before)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for want, data := range map[string]map[string][]byte{
		"make another one with `capstan host credentials`":                                           own.Data(),
		"create a token with `capstan host token create --name rack-1`, and let the host join again": joined.Data(),
	} {
		_, err := credentialsOf(&corev1.Secret{Data: data}, host)
		if !errors.Is(err, credentials.ErrExpired) || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("expected the remedy %q, found %v", want, err)
		}
	}
}
