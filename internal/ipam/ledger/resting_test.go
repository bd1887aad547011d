package ledger

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// ALL-12: the annotation contains the resting addresses of the record, and the target of a move reads them from it.
func TestMovedRests_ALL12(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	at := func(seconds int) metav1.Time { return metav1.NewTime(now.Add(time.Duration(seconds) * time.Second)) }
	pool := func(rests ...ipamv1.RestingAddresses) *ipamv1.CapstanIPPool {
		p := &ipamv1.CapstanIPPool{}
		p.Spec.RestSeconds = ptr.To[int32](160)
		p.Status.Allocator = &ipamv1.AllocatorStatus{Resting: rests}
		return p
	}
	// move copies the annotations that the pool would have after the copy.
	move := func(p *ipamv1.CapstanIPPool) *ipamv1.CapstanIPPool {
		t.Helper()
		changes, err := SavedAnnotations(p, now)
		if err != nil {
			t.Fatal(err)
		}
		out := &ipamv1.CapstanIPPool{Spec: p.Spec, ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}}
		for key, value := range changes {
			if text, ok := value.(string); ok {
				out.Annotations[key] = text
			}
		}
		if size := len(out.Annotations[ipamv1.RestingAnnotation]); size > maxAnnotation+1000 {
			t.Errorf("the annotation has %d bytes", size)
		}
		return out
	}
	big := func(until int) ipamv1.RestingAddresses {
		return ipamv1.RestingAddresses{Until: at(until), Offsets: strings.Repeat("A", 80_000)}
	}
	tests := map[string]struct {
		rests []ipamv1.RestingAddresses
		want  string
	}{
		"no resting address":             {nil, ""},
		"two end times":                  {[]ipamv1.RestingAddresses{{Until: at(10), Offsets: "AA"}, {Until: at(20), Offsets: "BB"}}, "10:2 20:2 "},
		"one period is over":             {[]ipamv1.RestingAddresses{{Until: at(0), Offsets: "AA"}, {Until: at(20), Offsets: "BB"}}, "20:2 "},
		"larger than the annotation":     {[]ipamv1.RestingAddresses{big(10), big(20), big(30)}, "20:80000 30:80000 "},
		"longer than the resting period": {[]ipamv1.RestingAddresses{{Until: at(1_000_000), Offsets: "AA"}}, "160:2 "},
	}
	for name, tt := range tests {
		source := pool(tt.rests...)
		target := move(source)
		got := ""
		for _, r := range moved(target, now) {
			got += fmt.Sprintf("%d:%d ", int(r.Until.Sub(now).Seconds()), len(r.Offsets))
		}
		if got != tt.want {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
		source.Annotations = target.Annotations
		if !Saved(source, now) {
			t.Errorf("%s: the copy counts as outdated", name)
		}
	}
	broken := pool()
	broken.Annotations = map[string]string{ipamv1.RestingAnnotation: "{"}
	if len(moved(broken, now)) != 0 {
		t.Error("an invalid annotation is read")
	}
}

// CTL-13: an update of the copy removes only our own block-move annotation.
func TestBlockMoveOfOthersStays_CTL13(t *testing.T) {
	p := &ipamv1.CapstanIPPool{}
	for value, ours := range map[string]bool{ipamv1.RestingBlocksMove: true, "theirs": false} {
		p.Annotations = map[string]string{clusterctlv1.BlockMoveAnnotation: value}
		changes, err := SavedAnnotations(p, time.Now())
		if _, removes := changes[clusterctlv1.BlockMoveAnnotation]; err != nil || removes != ours {
			t.Errorf("block-move=%s: got %v, %v", value, changes, err)
		}
	}
}
