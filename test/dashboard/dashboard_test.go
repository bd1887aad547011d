//go:build dashboard

// Package dashboard tests the page of `capstan dashboard` in a headless Chromium, with the program and a real API server.
package dashboard

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

var env *testenv.Env

func TestMain(m *testing.M) {
	os.Exit(testenv.Run(m, testenv.Options{AddToScheme: []func(*k8sruntime.Scheme) error{infrav1.AddToScheme, controlplanev1.AddToScheme, ipamv1.AddToScheme}}, &env))
}

// program is a running `capstan dashboard`.
type program struct {
	cmd *exec.Cmd
	url string
}

func start(t *testing.T, kubeconfig string, args ...string) *program {
	t.Helper()
	p := &program{cmd: exec.Command(filepath.Join(testenv.Root(), "bin", "capstan"), append([]string{"dashboard", "--kubeconfig", kubeconfig, "-o", "json"}, args...)...)}
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("%v: run `make build-capstan`", err)
	}
	t.Cleanup(p.stop)
	var ready struct{ URL string }
	if err := json.NewDecoder(bufio.NewReader(out)).Decode(&ready); err != nil {
		t.Fatalf("the address of the page: %v", err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	p.url = ready.URL
	return p
}

func (p *program) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Wait()
}

// browser is a tab of Chromium.
type browser struct {
	*testing.T
	ctx  context.Context
	seen *record
}

// record contains all requests and errors of a tab.
type record struct {
	sync.Mutex
	requests, errors []string
}

// of returns the tab for a subtest.
func (b *browser) of(t *testing.T) *browser { return &browser{t, b.ctx, b.seen} }

func open(t *testing.T) *browser {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.DisableGPU, chromedp.UserDataDir(t.TempDir()),
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("no-first-run", true))
	allocator, cancelAllocator := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancelAllocator)
	ctx, cancel := chromedp.NewContext(allocator)
	t.Cleanup(cancel)
	b := &browser{t, ctx, &record{}}
	err := chromedp.Listen(ctx, func(event any) {
		b.seen.Lock()
		defer b.seen.Unlock()
		switch e := event.(type) {
		case *network.EventRequestWillBeSent:
			b.seen.requests = append(b.seen.requests, e.Request.URL)
		case *runtime.EventExceptionThrown:
			b.seen.errors = append(b.seen.errors, fmt.Sprintf("%+v", e.ExceptionDetails))
		case *log.EventEntryAdded:
			b.seen.errors = append(b.seen.errors, e.Entry.Text)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	b.do(call(network.Enable, network.EnableParams{}), call(log.Enable, cdp.Empty{}), call(runtime.Enable, cdp.Empty{}))
	return b
}

// call is a command of the protocol whose answer is empty.
func call[P any](command cdp.Command[P, cdp.Empty], params P) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, command, params)
		return err
	})
}

// script runs an expression without a value.
func script(expression string) chromedp.Action[chromedp.Void] {
	return chromedp.Evaluate[chromedp.Void]("void (" + expression + ")")
}

func (b *browser) do(actions ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, expect.Patience)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.Fatal(err)
	}
}

// until waits until an expression is true.
func (b *browser) until(expression string) {
	b.Helper()
	if _, err := chromedp.Run(b.ctx, chromedp.Poll[bool](expression, chromedp.WithPollingInterval(50*time.Millisecond), chromedp.WithPollingTimeout(time.Minute))); err != nil {
		page, _ := chromedp.Run(b.ctx, chromedp.Evaluate[string]("document.body.innerText"))
		b.Fatalf("%s: %v\n%s", expression, err, page)
	}
}

func evaluate[T any](b *browser, expression string) T {
	b.Helper()
	value, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.Fatalf("%s: %v", expression, err)
	}
	return value
}

// clean fails after a request to another host, and after an error of the page, which a violation of its policy is too.
func (b *browser) clean(origin string) {
	b.Helper()
	b.seen.Lock()
	defer b.seen.Unlock()
	if len(b.seen.requests) < 4 {
		b.Errorf("found %d requests, want those of the page", len(b.seen.requests))
	}
	for _, url := range b.seen.requests {
		if !strings.HasPrefix(url, origin) {
			b.Errorf("a request to %s, want only those to %s", url, origin)
		}
	}
	for _, text := range b.seen.errors {
		b.Errorf("error of the page: %s", text)
	}
}

// view is a size of a window and a theme.
func (b *browser) view(width, height int64, phone bool, theme string) {
	b.Helper()
	b.do(call(emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{Width: width, Height: height, DeviceScaleFactor: 1, Mobile: phone}),
		call(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: theme}, {Name: "prefers-reduced-motion", Value: "reduce"},
		}}))
}

// contrasts lists the texts whose contrast is below WCAG AA.
const contrasts = `(() => {
  const rgb = (c) => { const v = c.match(/[\d.]+/g).map(Number); return { c: v.slice(0, 3), a: v.length > 3 ? v[3] : 1 }; };
  const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const b = rgb(getComputedStyle(e).backgroundColor); if (b.a === 1) return b.c; } return [255, 255, 255]; };
  const bad = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  for (let n = walker.nextNode(); n; n = walker.nextNode()) {
    const e = n.parentElement;
    if (!n.data.trim() || !e.checkVisibility({ visibilityProperty: true }) || e.closest('.hidden, .skip, noscript')) continue;
    count++;
    const s = getComputedStyle(e), a = light(rgb(s.color).c), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.add(e.className + ' "' + n.data.slice(0, 30) + '" ' + ratio.toFixed(2));
  }
  return count < 100 ? ['only ' + count + ' texts'] : [...bad];
})()`

const complete = `document.getElementById('live-text').textContent === 'Live' && document.querySelectorAll('.cluster').length === 3 && document.querySelectorAll('.unit').length === 5 && document.querySelectorAll('.machine').length === 16`

func TestPage(t *testing.T) {
	f := &fleet{t: t, client: env.Client, now: time.Now()}
	f.build()
	g := newGate(t)
	p := start(t, kubeconfigFor(t, g.address(), ""))
	b := open(t)
	b.view(1440, 1000, false, "light")
	b.do(chromedp.Navigate(p.url))
	b.until(complete)
	for name, test := range map[string]struct {
		width, height int64
		phone         bool
		theme         string
	}{
		"desktop-light": {1440, 1500, false, "light"}, "desktop-dark": {1440, 1500, false, "dark"},
		"phone-light": {360, 780, true, "light"}, "phone-dark": {360, 780, true, "dark"},
	} {
		b.view(test.width, test.height, test.phone, test.theme)
		if bad := evaluate[[]string](b, contrasts); len(bad) > 0 {
			t.Errorf("%s: contrast below 4.5: %q", name, bad)
		}
		b.screenshot(name)
	}
	t.Run("no horizontal scrolling", func(t *testing.T) { b.of(t).narrow() })
	b.view(1440, 1000, false, "light")
	t.Run("content", func(t *testing.T) { b.of(t).content() })
	t.Run("picture of clusters", func(t *testing.T) { b.of(t).clusters() })
	t.Run("hostile texts", func(t *testing.T) { b.of(t).inert() })
	t.Run("keyboard", func(t *testing.T) { b.of(t).keyboard() })
	t.Run("changes", func(t *testing.T) { b.of(t).changes() })
	b.clean(strings.TrimSuffix(p.url, "/"))
	t.Run("policy", func(t *testing.T) { b.of(t).policy() }) // after clean, because it causes an error on purpose
	t.Run("lost API", func(t *testing.T) { b.of(t).losesAPI(g) })
	t.Run("lost command", func(t *testing.T) { b.of(t).reconnects(p, kubeconfigFor(t, g.address(), "")) })
	t.Run("tenant", func(t *testing.T) { b.of(t).tenant(kubeconfigFor(t, g.address(), "tenant")) })
}

// kubeconfigFor writes a kubeconfig of a user for the namespace team-a. No user: the administrator.
func kubeconfigFor(t *testing.T, server, user string) string {
	t.Helper()
	config, err := clientcmd.Load(env.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for name := range config.Clusters {
		config.Clusters[name].Server = "https://" + server
	}
	for name := range config.AuthInfos {
		config.AuthInfos[name].Impersonate = user
	}
	for name := range config.Contexts {
		config.Contexts[name].Namespace = "team-a"
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// gate forwards connections to the API server until it is closed.
type gate struct {
	t        *testing.T
	mutex    sync.Mutex
	listener net.Listener
	open     []net.Conn
}

func newGate(t *testing.T) *gate {
	g := &gate{t: t}
	g.serve("127.0.0.1:0")
	t.Cleanup(g.close)
	return g
}

func (g *gate) address() string { return g.listener.Addr().String() }

func (g *gate) serve(address string) {
	g.t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		g.t.Fatal(err)
	}
	g.listener = listener
	target := strings.Trim(strings.TrimPrefix(env.Config.Host, "https://"), "/")
	go func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", target)
			if err != nil {
				_ = in.Close()
				continue
			}
			g.mutex.Lock()
			g.open = append(g.open, in, out)
			g.mutex.Unlock()
			for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() { _, _ = io.Copy(pair[0], pair[1]); _ = in.Close(); _ = out.Close() }()
			}
		}
	}()
}

func (g *gate) close() {
	_ = g.listener.Close()
	g.mutex.Lock()
	defer g.mutex.Unlock()
	for _, conn := range g.open {
		_ = conn.Close()
	}
}

// losesAPI closes the connections to the API server. The page says so, keeps its content, and recovers.
func (b *browser) losesAPI(g *gate) {
	b.Helper()
	address := g.address()
	g.close()
	b.until(`document.getElementById('banner').innerText.includes('management API does not answer') && document.getElementById('live-text').textContent === 'No answer' && document.querySelectorAll('.cluster').length === 3`)
	g.serve(address)
	b.until(`document.getElementById('live-text').textContent === 'Live' && document.getElementById('banner').hidden`)
}

// tenant opens the page as a user with rights for a few kinds in one namespace.
func (b *browser) tenant(kubeconfig string) {
	b.Helper()
	f := &fleet{t: b.T, client: env.Client, now: time.Now()}
	f.create("apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {namespace: team-a, name: viewer}\nrules:\n" +
		"- {apiGroups: [cluster.x-k8s.io], resources: [clusters, machines], verbs: [list, watch]}\n- {apiGroups: [infrastructure.capstan.dev], resources: [capstanmachines], verbs: [list, watch]}\n")
	f.create("apiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\nmetadata: {namespace: team-a, name: viewer}\n" +
		"roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: viewer}\nsubjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: tenant}]\n")
	p := start(b.T, kubeconfig)
	b.do(chromedp.Navigate(p.url))
	b.until(`document.getElementById('live-text').textContent === 'Live' && document.querySelectorAll('.cluster').length === 2 && document.querySelectorAll('.unit.unknown').length === 3`)
	b.until(`['hosts', 'pools', 'events'].every((section) => document.querySelector('#' + section + ' .notice').innerText.includes('Your rights do not include'))`)
	if text := evaluate[string](b, "document.body.innerText"); strings.Contains(text, "team-b") || strings.Contains(text, "10.0.1.11") {
		b.Errorf("the page shows what the tenant cannot read:\n%s", text)
	}
	b.view(360, 780, true, "light")
	if width := evaluate[int](b, "document.documentElement.scrollWidth"); width > 360 {
		b.Errorf("the page is %d wide in a window of 360", width)
	}
	b.screenshot("tenant")
}

// screenshot stores a picture in docs/images if CAPSTAN_SCREENSHOTS is set. Pictures differ with each run.
func (b *browser) screenshot(name string) {
	b.Helper()
	b.do(script("scrollTo(0, 0)"))
	b.picture(name)
}

// picture is a screenshot of the part of the page that is visible.
func (b *browser) picture(name string) {
	b.Helper()
	picture, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.Fatal(err)
	}
	picture = b.reduce(picture)
	if len(picture) < 10_000 || len(picture) > 200<<10 {
		b.Errorf("the picture %s has %d bytes", name, len(picture))
	}
	if folder := os.Getenv("CAPSTAN_SCREENSHOTS"); folder != "" {
		if err := os.WriteFile(filepath.Join(folder, "dashboard-"+name+".png"), picture, 0o644); err != nil {
			b.Fatal(err)
		}
	}
}

// reduce stores a picture with the 256 colours that are most frequent in it, because it is a part of the repository.
func (b *browser) reduce(picture []byte) []byte {
	b.Helper()
	full, err := png.Decode(bytes.NewReader(picture))
	if err != nil {
		b.Fatal(err)
	}
	area := full.Bounds()
	counts := map[color.RGBA]int{}
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(full.At(x, y)).(color.RGBA) }
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			counts[at(x, y)]++
		}
	}
	frequent := slices.SortedFunc(maps.Keys(counts), func(p, q color.RGBA) int { return counts[q] - counts[p] })
	var palette color.Palette
	for _, c := range frequent[:min(256, len(frequent))] {
		palette = append(palette, c)
	}
	small := image.NewPaletted(area, palette)
	index := map[color.RGBA]uint8{}
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			c := at(x, y)
			i, found := index[c]
			if !found {
				i = uint8(palette.Index(c))
				index[c] = i
			}
			small.SetColorIndex(x, y, i)
		}
	}
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, small); err != nil {
		b.Fatal(err)
	}
	return out.Bytes()
}

func (b *browser) narrow() {
	b.Helper()
	b.view(360, 780, true, "light")
	b.do(script(`document.querySelectorAll('details').forEach((d) => d.open = true)`))
	if width := evaluate[int](b, "document.documentElement.scrollWidth"); width > 360 {
		b.Errorf("the page is %d wide in a window of 360: %s", width, evaluate[string](b, `[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 361).map((e) => e.className).slice(0, 8).join(' | ')`))
	}
}

func (b *browser) inert() {
	b.Helper()
	if evaluate[bool](b, "'pwned' in window") {
		b.Error("a text of an object was run")
	}
	if found := evaluate[int](b, "document.scripts.length + document.querySelectorAll('main img, main iframe, main b:not(.counts b)').length"); found != 1 {
		b.Errorf("found %d scripts, images and bold texts, want the script of the page", found)
	}
	if !evaluate[bool](b, fmt.Sprintf("document.getElementById('events').innerText.includes(%q) && document.getElementById('clusters').innerText.includes(%q)", hostile, hostile)) {
		b.Error("the hostile text is not shown as text")
	}
}

// content checks what the sections show of the objects.
func (b *browser) content() {
	b.Helper()
	for what, test := range map[string]struct {
		rows string // an expression for the texts of all rows
		want []string
	}{
		"pools with their numbers": {
			`[...document.querySelectorAll('#pools .pool')].map((p) => p.querySelector('.name').textContent + ': ' + [...p.querySelectorAll('.counts span')].map((s) => s.textContent).join(', '))`,
			[]string{"rack-lan: 212 free, 42 used, of 254", "ledger-net: 0 free, 13 used, 2 claims wait, of 13"},
		},
		"used addresses": {
			`[...document.querySelectorAll('#pools .addresses li')].map((a) => a.textContent)`,
			[]string{"10.64.6.2team-b/ledger-0", "10.64.6.6team-b/ledger-4"},
		},
		"conditions with their reasons": {
			`[...document.querySelectorAll('#clusters .conditions li.bad')].map((c) => ['.condition', '.reason', '.message'].map((part) => c.querySelector(part)?.textContent).join(' | '))`,
			[]string{"WorkersAvailable | NotAvailable | MachineDeployment ledger-md-0: 1 of 3 machines is available"},
		},
		"topology: groups of a cluster with their machines and hosts": {
			`[...document.querySelectorAll('#clusters .cluster')].flatMap((c) => [...c.querySelectorAll('.group')].map((g) => [c, g].map((x) => x.querySelector('.name').textContent).join(' > ') + ': ' +
				[...g.querySelectorAll('.machine')].map((m) => m.querySelector('.name').textContent + ' on ' + m.querySelector('.host').textContent).sort().join(', ')))`,
			[]string{
				"ledger > ledger-md-0: ledger-md-0-9qf4z on no host, ledger-md-0-h3n5t on rack-b-1, ledger-md-0-w6g8d on rack-b-2",
				"shop > shop: shop-cp-1 on rack-a-1, shop-cp-2 on rack-b-1, shop-cp-3 on rack-a-1",
			},
		},
		"ongoing operations": {
			`[...document.querySelectorAll('#waiting .update .what')].map((u) => u.textContent)`,
			[]string{"Update of team-a/search-cp-1 to v1.36.3 UpdateRunning" + "control plane of search · step kubelet · 1 not up to date"},
		},
	} {
		rows := evaluate[[]string](b, test.rows)
		for _, want := range test.want {
			if !slices.Contains(rows, want) {
				b.Errorf("%s: expected the row %q, found %q", what, want, rows)
			}
		}
	}
}

// clusters stores a picture of the clusters with open conditions.
func (b *browser) clusters() {
	b.Helper()
	open := func(open bool) chromedp.Action[chromedp.Void] {
		return script(fmt.Sprintf(`document.querySelectorAll('#clusters .cluster[open] .conditions').forEach((c) => { c.open = %v; })`, open))
	}
	b.do(open(true), script("document.getElementById('clusters').scrollIntoView()"))
	b.picture("clusters")
	b.do(open(false))
}

// policy checks that the policy of the page refuses what its script never does.
func (b *browser) policy() {
	b.Helper()
	if blocked := evaluate[bool](b, `(() => { try { document.createElement('p').innerHTML = '<b>'; return false; } catch { return true; } })()`); !blocked {
		b.Error("the policy of the page permits innerHTML")
	}
}

func (b *browser) keyboard() {
	b.Helper()
	focused := func(want string) {
		b.Helper()
		if !evaluate[bool](b, "Boolean(document.activeElement && document.activeElement.matches("+fmt.Sprintf("%q", want)+"))") {
			b.Errorf("focus is at %s, want %s", evaluate[string](b, "document.activeElement.outerHTML.slice(0, 120)"), want)
		}
	}
	b.do(script("document.activeElement.blur()"), chromedp.KeyEvent(kb.Tab))
	focused(".skip")
	b.do(call(input.DispatchKeyEvent, input.DispatchKeyEventParams{Type: input.DispatchKeyEventTypeKeyDown, Key: "/", Code: "Slash", Text: "/"}))
	focused("#filter")
	b.do(chromedp.KeyEvent("ledger"))
	b.until("document.querySelectorAll('.cluster').length === 1")
	b.do(chromedp.KeyEvent(kb.Escape))
	b.until("document.querySelectorAll('.cluster').length === 3")
	// One machine of each host is in the order of the tabulator, arrows reach the others, Enter shows the machine.
	if stops, hosts := evaluate[int](b, "document.querySelectorAll('button.slot:not([tabindex=\"-1\"])').length"), 4; stops != hosts {
		b.Errorf("%d machines are in the order of the tabulator, want one for each of %d hosts", stops, hosts)
	}
	b.do(script("document.querySelector('button.slot').focus()"), chromedp.KeyEvent(kb.ArrowRight))
	focused("button.slot:nth-child(2)")
	machine := evaluate[string](b, "document.activeElement.dataset.goto")
	b.do(chromedp.KeyEvent(kb.Enter))
	focused("li.machine")
	if shown := evaluate[string](b, "document.activeElement.dataset.key"); shown != machine {
		b.Errorf("Enter shows %s, want %s", shown, machine)
	}
	if outline := evaluate[string](b, "(() => { const e = document.querySelector('.tile'); e.focus({focusVisible: true}); return getComputedStyle(e).outlineStyle; })()"); outline != "solid" {
		b.Errorf("the focus has the outline %q", outline)
	}
}

// changes checks that a change of an object changes the page, and keeps focus and open parts.
func (b *browser) changes() {
	b.Helper()
	b.do(script(`(() => { const d = document.querySelector('[data-key="Cluster/team-a/shop"]'); d.open = true; d.querySelector('summary').focus(); window.kept = d; })()`))
	host := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "infrastructure.capstan.dev/v1beta2", "kind": "CapstanHost"}}
	host.SetName("rack-c-1")
	const message = "expected an answer of capstand at 10.0.3.11:8443, found none"
	if err := setCondition(b.Context(), env.Client, host, map[string]any{"type": "Connected", "status": "False", "reason": "Unreachable", "message": message, "lastTransitionTime": time.Now().UTC().Format(time.RFC3339)}); err != nil {
		b.Fatal(err)
	}
	b.until(fmt.Sprintf("document.getElementById('waiting').innerText.includes(%q) && document.querySelector('[data-key=\"CapstanHost//rack-c-1\"]').matches('.attention')", message))
	namespace := &corev1.Namespace{}
	namespace.Name = "team-c"
	if err := env.Client.Create(b.Context(), namespace); err != nil {
		b.Fatal(err)
	}
	f := &fleet{t: b.T, client: env.Client, now: time.Now()}
	f.cluster("team-c", "fresh", "desiredReplicas: 1", "desiredReplicas: 0", f.good("InfrastructureReady"))
	b.until("document.querySelectorAll('.cluster').length === 4")
	if !evaluate[bool](b, "window.kept.isConnected && window.kept.open && document.activeElement === window.kept.querySelector('summary')") {
		b.Error("the change moved the focus or closed a part")
	}
	fresh := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster"}}
	fresh.SetNamespace("team-c")
	fresh.SetName("fresh")
	if err := env.Client.Delete(b.Context(), fresh); client.IgnoreNotFound(err) != nil {
		b.Fatal(err)
	}
	b.until("document.querySelectorAll('.cluster').length === 3")
}

// reconnects stops the command. The page says so, keeps its content, and names the cause after a new start.
func (b *browser) reconnects(p *program, kubeconfig string) {
	b.Helper()
	p.stop()
	b.until("!document.getElementById('banner').hidden && document.getElementById('banner').innerText.includes('connection') && document.querySelectorAll('.cluster').length === 3")
	port := p.url[len("http://127.0.0.1:"):]
	again := start(b.T, kubeconfig, "--port", port[:strings.IndexByte(port, '/')])
	b.until("document.getElementById('banner').innerText.includes('started again')")
	b.do(chromedp.Navigate(again.url))
	b.until(`document.getElementById('live-text').textContent === 'Live' && document.getElementById('banner').hidden`)
}
