package controlplane

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// TestEventsOfChanges: a condition that changes has an event, also if it existed before, and one that stays has none.
func TestEventsOfChanges(t *testing.T) {
	fake := events.NewFakeRecorder(10)
	s := &scope{ControlPlane: &model.ControlPlane{Object: &controlplanev1.CapstanControlPlane{}}}
	backups, rotations, restores := &backups{recorder: &recorder{fake}}, &rotations{recorder: &recorder{fake}}, &restores{recorder: &recorder{fake}}
	for _, kind := range []string{controlplanev1.BackupSucceededCondition, controlplanev1.CertificateAuthorityRotatingCondition, controlplanev1.RestoredCondition} {
		conditions.Set(s.Object, metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: "Before"})
	}
	for _, step := range []struct {
		name string
		do   func()
		want string
	}{
		{"a failure after a success", func() { backups.showBackups(s, nil, "no space") }, "Warning BackupFailed no space"},
		{"the same failure", func() { backups.showBackups(s, nil, "no space") }, ""},
		{"another failure", func() { backups.showBackups(s, nil, "no right") }, "Warning BackupFailed no right"},
		{"the end of a rotation", func() { rotations.setRotating(s, model.Rotation{}) }, "Normal NotRotating No rotation is in progress: one certificate authority"},
		{"an unusable backup", func() { restores.cannotRestore(s, model.RestoreBegin, []string{"no store"}) }, "Warning RestoreImpossible The backup  cannot be restored: no store"},
		{"the same unusable backup", func() { restores.cannotRestore(s, model.RestoreBegin, []string{"no store"}) }, ""},
		{"a refused backup", func() { restores.refuseRestore(s, []string{"no store"}) }, "Warning RestoreImpossible The backup  cannot be restored: no store. Nothing was changed"},
		{"the same refused backup", func() { restores.refuseRestore(s, []string{"no store"}) }, ""},
		{"no rotation", func() { rotations.setRotating(s, model.Rotation{}) }, ""},
	} {
		step.do()
		got := ""
		select {
		case got = <-fake.Events:
		default:
		}
		if !strings.HasPrefix(got, step.want) || step.want == "" && got != "" {
			t.Errorf("%s: event %q, want %q", step.name, got, step.want)
		}
	}
}
