package webhook_test

import (
	"context"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/webhook"
)

func pool(label string, annotations map[string]string) *infrav1.CapstanMachinePool {
	p := &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
	p.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"tier": label}
	p.Spec.MachineTemplate.ObjectMeta.Annotations = annotations
	return p
}

// MP-09: new invalid metadata is refused. An object that already had it still accepts other changes.
func TestMachinePoolMetadata_MP09(t *testing.T) {
	leaving := pool("a b", nil)
	now := metav1.Now()
	leaving.DeletionTimestamp = &now
	scaled := pool("a b", nil)
	scaled.Spec.ID = "12345678"
	for name, tt := range map[string]struct {
		before, pool *infrav1.CapstanMachinePool
		want         string
	}{
		"good":                     {nil, pool("a", map[string]string{"example.com/note": "a b"}), ""},
		"bad label":                {nil, pool("a b", nil), "spec.machineTemplate.metadata.labels"},
		"bad annotation":           {nil, pool("a", map[string]string{"no key": ""}), "spec.machineTemplate.metadata.annotations"},
		"becomes bad":              {pool("a", nil), pool("a b", nil), "spec.machineTemplate.metadata.labels"},
		"becomes good":             {pool("a b", nil), pool("a", nil), ""},
		"was bad, is changed else": {pool("a b", nil), scaled, ""},
		"leaves":                   {pool("a", nil), leaving, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			if tt.before == nil {
				_, err = webhook.MachinePool{}.ValidateCreate(context.Background(), tt.pool)
			} else {
				_, err = webhook.MachinePool{}.ValidateUpdate(context.Background(), tt.before, tt.pool)
			}
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
