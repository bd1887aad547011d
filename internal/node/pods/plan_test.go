package pods

import (
	"reflect"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestContainersOf(t *testing.T) {
	sandboxes := []*cri.PodSandbox{
		{Id: "api", Annotations: map[string]string{sourceAnnotation: "api"}},
		{Id: "static", Annotations: map[string]string{sourceAnnotation: "file"}},
	}
	for name, tt := range map[string]struct {
		sandbox, namespace, grace, hook string
		want                            Container
		exec                            []string
		sleep                           int64
	}{
		"a pod":                  {sandbox: "api", namespace: "default", grace: "8", want: Container{Grace: 8 * time.Second}},
		"no grace period":        {sandbox: "api", namespace: "default", grace: "0", want: Container{}},
		"a negative one":         {sandbox: "api", namespace: "default", grace: "-9223372036854775808", want: Container{}},
		"one that overflows":     {sandbox: "api", namespace: "default", grace: "9223372036854775807", want: Container{Grace: 24 * time.Hour}},
		"not a number":           {sandbox: "api", namespace: "default", grace: "x", want: Container{Grace: 30 * time.Second}},
		"none":                   {sandbox: "api", namespace: "default", want: Container{Grace: 30 * time.Second}},
		"a static pod":           {sandbox: "static", namespace: "default", grace: "1", want: Container{Grace: time.Second, Last: true}},
		"the system's namespace": {sandbox: "api", namespace: "kube-system", grace: "1", want: Container{Grace: time.Second, Last: true}},
		"an unknown sandbox":     {sandbox: "gone", namespace: "default", grace: "1", want: Container{Grace: time.Second}},
		"a command": {sandbox: "api", namespace: "default", grace: "1", hook: `{"exec":{"command":["/bin/flush","-a"]}}`,
			want: Container{Grace: time.Second}, exec: []string{"/bin/flush", "-a"}},
		"a sleep":         {sandbox: "api", namespace: "default", grace: "1", hook: `{"sleep":{"seconds":5}}`, want: Container{Grace: time.Second}, sleep: 5},
		"a damaged hook":  {sandbox: "api", namespace: "default", grace: "1", hook: `{"exec":{"command":["a"]},"sleep":3}`, want: Container{Grace: time.Second}},
		"a negative time": {sandbox: "api", namespace: "default", grace: "1", hook: `{"sleep":{"seconds":-5}}`, want: Container{Grace: time.Second}, sleep: -5},
	} {
		annotations := map[string]string{preStopAnnotation: tt.hook}
		if tt.grace != "" {
			annotations[graceAnnotation] = tt.grace
		}
		got := containersOf(sandboxes, []*cri.Container{{Id: "c", PodSandboxId: tt.sandbox, Annotations: annotations, Labels: map[string]string{
			namespaceLabel: tt.namespace, podLabel: "pod", containerLabel: "main",
		}}})[0]
		var exec []string
		var sleep int64
		if got.preStop.Exec != nil {
			exec = got.preStop.Exec.Command
		}
		if got.preStop.Sleep != nil {
			sleep = got.preStop.Sleep.Seconds
		}
		tt.want.ID, tt.want.Name, tt.want.sandbox, got.preStop = "c", tt.namespace+"/pod/main", tt.sandbox, hook{}
		if !reflect.DeepEqual(got, tt.want) || !reflect.DeepEqual(exec, tt.exec) || sleep != tt.sleep {
			t.Errorf("%s: %+v, command %q, sleep %d; want %+v, %q, %d", name, got, exec, sleep, tt.want, tt.exec, tt.sleep)
		}
	}
}

func TestPhases(t *testing.T) {
	one, other := Container{ID: "one"}, Container{ID: "last", Last: true}
	for name, tt := range map[string]struct {
		in   []Container
		want []phase
	}{
		"ordinary pods":    {[]Container{one}, []phase{{[]Container{one}, 30 * time.Second, false}}},
		"pods of a system": {[]Container{other}, []phase{{[]Container{other}, 30 * time.Second, true}}},
		"both": {[]Container{other, one}, []phase{
			{[]Container{one}, 20 * time.Second, false}, {[]Container{other}, 10 * time.Second, true},
		}},
	} {
		if got := phases(tt.in, 30*time.Second); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

func TestSeconds(t *testing.T) {
	for in, want := range map[time.Duration]int64{-time.Second: 0, 0: 0, time.Millisecond: 1, time.Second: 1, 1500 * time.Millisecond: 2} {
		if got := seconds(in); got != want {
			t.Errorf("%s: %d, want %d", in, got, want)
		}
	}
}

// The request of a hook goes to the pod. Its port is a number or a name of the container.
func TestHTTPGet(t *testing.T) {
	const ports = `[{"name":"web","containerPort":8080,"protocol":"TCP"}]`
	for hook, want := range map[string]string{
		`{"port":80}`:                        "http://10.1.1.1:80/ 10.1.1.1:80",
		`{"port":"web","path":"quit?now=1"}`: "http://10.1.1.1:8080/quit?now=1 10.1.1.1:8080",
		`{"port":"443","path":"/a","scheme":"HTTPS","host":"other.example"}`:    "https://other.example:443/a other.example:443",
		`{"port":80,"path":"/","httpHeaders":[{"name":"Host","value":"site"}]}`: "http://10.1.1.1:80/ site",
		`{"port":"none"}`:  `the container has no port "none"`,
		`{"port":70000}`:   `the container has no port "70000"`,
		`{}`:               `the container has no port ""`,
		`{"port":{"a":1}}`: `the container has no port "{\"a\":1}"`,
	} {
		r, err := hookOf(`{"httpGet":`+hook+`}`, ports).HTTPGet.request(t.Context(), "10.1.1.1")
		var got string
		if err != nil {
			got = err.Error()
		} else {
			got = r.URL.String() + " " + r.Host
		}
		if got != want {
			t.Errorf("%s: %s, want %s", hook, got, want)
		}
	}
}
